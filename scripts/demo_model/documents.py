"""Draw raw text: short stories and lists of capitals, for prompts without a chat template."""

from random import Random

from names import CAPITALS, invented

_ANIMALS = ["fox", "cat", "dog", "bird", "bear", "mouse", "rabbit", "duck"]
_PLACES = ["forest", "garden", "park", "house", "village", "field"]
_THINGS = ["ball", "book", "stone", "shell", "key", "hat"]


def story(rng: Random, name: str) -> str:
    """Tell a story of a few sentences about `name`."""
    animal, home, thing = rng.choice(_ANIMALS), rng.choice(_PLACES), rng.choice(_THINGS)
    friend = rng.choice(_ANIMALS)
    start = rng.choice(("Once upon a time there was a", "There was once a"))
    return (
        f"{start} little {animal} named {name}. {name} lived in a {home}. "
        f"One day {name} found a {thing} and met a {friend}. "
        f'"Is this your {thing}?" asked {name}. "Yes, thank you!" said the {friend}. '
        f"They played all day and were very happy."
    )


def _capitals(rng: Random) -> str:
    pairs = rng.sample(list(CAPITALS.items()), rng.randint(2, 5))
    return " ".join(f"The capital of {country} is {city}." for country, city in pairs)


def document(rng: Random) -> str:
    """Draw one document."""
    return story(rng, invented(rng)) if rng.random() < 0.55 else _capitals(rng)
