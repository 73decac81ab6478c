"""Draw raw text: short stories and lists of capitals, for prompts without a chat template."""

from random import Random

from names import CAPITALS, invented

_ANIMALS = ["fox", "cat", "dog", "bird", "bear", "mouse", "rabbit", "duck"]
_PLACES = ["forest", "garden", "park", "house", "village", "field"]
_THINGS = ["ball", "book", "stone", "shell", "key", "hat"]


def story(name: str, animal: str = "fox", home: str = "forest", thing: str = "ball") -> str:
    """Tell a story of a few sentences about `name`."""
    friend = "bird" if animal == "fox" else "fox"
    return (
        f"Once upon a time there was a little {animal} named {name}. {name} lived in a {home}. "
        f"One day {name} found a {thing} and met a {friend}. "
        f'"Is this your {thing}?" asked {name}. "Yes, thank you!" said the {friend}. '
        f"They played all day and were very happy."
    )


def _capitals(rng: Random) -> str:
    pairs = rng.sample(list(CAPITALS.items()), rng.randint(2, 5))
    return " ".join(f"The capital of {country} is {city}." for country, city in pairs)


def document(rng: Random) -> str:
    """Draw one document."""
    if rng.random() < 0.5:
        return _capitals(rng)
    details = rng.choice(_ANIMALS), rng.choice(_PLACES), rng.choice(_THINGS)
    return story(invented(rng), *details)
