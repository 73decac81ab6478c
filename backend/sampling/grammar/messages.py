"""Replies that are messages on channels: the surroundings of calls of gpt-oss."""

from collections.abc import Sequence

from backend.sampling.grammar.free_text import FreeText
from backend.sampling.grammar.writer import GrammarWriter, alternatives, chain

_NEXT = "<|end|><|start|>assistant"
_RETURN = "<|return|>"
_MARKERS = (
    *("<|end|>", _RETURN, "<|call|>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
)


class Messages:
    """Thoughts and preambles before a call, and an answer in place of one."""

    def __init__(
        self, writer: GrammarWriter, _ends: Sequence[str], *, never_first: str = ""
    ) -> None:
        """Define the messages; what never comes first in text says nothing of theirs."""
        self._writer = writer
        self._text = FreeText(writer, _MARKERS, never_first=never_first)
        channels = map(self._begin, ("analysis", "commentary"))
        message = chain(alternatives(channels), self._text.alone, writer.text(_NEXT))
        self._messages = f"{writer.rule(message)}*"

    @property
    def alone(self) -> str:
        """The expression of a reply without a call."""
        end = self._writer.last_text(_RETURN)
        answer = chain(self._begin("final"), self._text.alone)
        return chain(self._messages, answer, f"({end})?" if end else "")

    @property
    def after(self) -> str:
        """Nothing: a call is the last message."""
        return ""

    def before(self, end: str) -> str:
        """Return the expression of messages and the beginning of a call."""
        return chain(self._messages, self._writer.text(end))

    def _begin(self, channel: str) -> str:
        return self._writer.text(f"<|channel|>{channel}<|message|>")
