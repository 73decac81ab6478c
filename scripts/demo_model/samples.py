"""Defines one training sample; draws raw text: short stories and lists of capitals."""

from dataclasses import dataclass
from random import Random
from typing import Any

from names import CAPITALS, invented

Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """One conversation and the assistant turn to learn from it.

    Attributes:
        task: Name of the task, for the accuracy report.
        messages: Conversation up to the turn to learn, OpenAI style.
        thought: The model's thought, when thinking is on.
        answer: Its answer, tool call markup included.
        tools: Offered tools, or None.
        thinking: Whether the turn begins with the thought.
    """

    task: str
    messages: list[Message]
    thought: str
    answer: str
    tools: list[Tool] | None = None
    thinking: bool = True

    @property
    def target(self) -> str:
        """The text that the model must produce after the prompt."""
        if not self.thinking:
            return self.answer
        return f"<think>\n{self.thought}\n</think>\n\n{self.answer}"


def user(text: str) -> Message:
    """Make a user message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """Make an assistant message."""
    return {"role": "assistant", "content": text}


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
