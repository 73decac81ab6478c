"""Defines one training sample."""

from dataclasses import dataclass
from typing import Any

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
