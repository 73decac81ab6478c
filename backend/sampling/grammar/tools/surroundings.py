"""The text allowed around calls."""

from collections.abc import Sequence
from typing import Protocol

from backend.formats.dialects import Messages
from backend.formats.grammar import Section
from backend.sampling.grammar.free_text import FreeText
from backend.sampling.grammar.writer import GrammarWriter, alternatives, chain


class Surroundings(Protocol):
    """The text allowed around calls."""

    @property
    def alone(self) -> str:
        """Expression of a reply without calls."""

    @property
    def after(self) -> str:
        """Expression of the text after calls."""

    def before(self, end: str) -> str:
        """Return the expression of the text before calls, including their opener."""


class AroundMessages:
    """Thoughts and preambles as messages before a call, or an answer instead of one."""

    def __init__(self, messages: Messages, writer: GrammarWriter) -> None:
        self._messages = messages
        self._writer = writer
        self._text = FreeText(writer, messages.tokens)
        next_message = f"{messages.ends[0]}{messages.start}{messages.roles[0]}"
        heads = alternatives(map(writer.text, messages.heads))
        self._earlier = f"{writer.rule(chain(heads, self._text.alone, writer.text(next_message)))}*"

    @property
    def alone(self) -> str:
        """Expression of a reply without calls."""
        end = self._writer.last_text(self._messages.last_ends[-1])
        answer = chain(self._writer.text(self._messages.answer), self._text.alone)
        return chain(self._earlier, answer, f"({end})?" if end else "")

    @property
    def after(self) -> str:
        """Empty: calls come last."""
        return ""

    def before(self, end: str) -> str:
        """Return the expression of messages followed by the beginning of a call."""
        return chain(self._earlier, self._writer.text(end))


class AfterSection:
    """An answer in its own section, before the calls or instead of them."""

    def __init__(self, section: Section, writer: GrammarWriter, ends: Sequence[str]) -> None:
        """Define the section.

        Args:
            section: The section's markers.
            writer: Collects the definitions.
            ends: Other texts that the answer does not contain.
        """
        self._section = section
        self._writer = writer
        self._text = FreeText(writer, (*ends, *filter(None, (section.begin, section.end))))
        begin = writer.text(section.begin)
        self._begin = f"({begin})?" if section.may_be_open else begin

    @property
    def alone(self) -> str:
        """Expression of a reply without calls."""
        end = self._writer.text(self._section.end)
        return chain(self._begin, self._text.alone, f"({end})?" if self._section.closes else "")

    @property
    def after(self) -> str:
        """Empty: calls come last."""
        return ""

    def before(self, end: str) -> str:
        """Return the expression of an optional section followed by the beginning of calls."""
        section = chain(self._begin, self._text.before(self._section.end))
        return chain(f"({section})?", self._writer.text(end))


def empty_section(section: Section, writer: GrammarWriter) -> str:
    """Return the expression of an empty section, which models write before calls."""
    begin, end = writer.text(section.begin), writer.text(section.end)
    return f"(({begin})? {end})?" if section.may_be_open else ""
