"""Strings of dialects that look like a programming language."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from backend.formats.closing import Limits
from backend.formats.dialects import Literals
from backend.sampling.grammar.schema.tight import Schema
from backend.sampling.grammar.tools.json_values import json_text, json_value
from backend.sampling.grammar.tools.raw_text import Ending, RawText
from backend.sampling.grammar.writer import GrammarWriter, alternatives, chain, quoted, sequence

_UNQUOTED = frozenset("'\\")


class LiteralStrings(Protocol):
    """Writes strings."""

    def string(self, schema: Schema, conditions: Iterable[str], limits: Limits) -> str:
        """Return the expression of the strings allowed by a schema.

        Args:
            schema: A schema of type string.
            conditions: Terminals that express the same conditions on the text.
            limits: What a text without escapes cannot contain in its place.
        """

    def constant(self, text: str) -> str:
        """Return the expression of one string."""

    def key(self, name: str) -> str:
        """Return the expression of an object key inside a value."""

    def any_key(self) -> str:
        """Return the expression of an undeclared key."""


@dataclass(frozen=True, slots=True)
class RawStrings:
    """Raw text in the format's own quotes, and bare keys."""

    quote: str
    writer: GrammarWriter

    def string(self, _schema: Schema, conditions: Iterable[str], limits: Limits) -> str:
        """Return the expression of the strings allowed by a schema."""
        quote = self.writer.pieces(self.quote)
        if not any(isinstance(piece, int) for piece in quote):
            limits = Limits(inside=((self.quote,),))
        text = RawText.of(limits, self.writer.vocabulary, conditions, ())
        first, *others = quote
        return chain(sequence(quote), text.before(Ending(first, sequence(others)), self.writer))

    def constant(self, text: str) -> str:
        """Return the expression of one string; one with a quote in it is written as JSON."""
        if self.quote in text:
            return quoted(json_text(text))
        quote = self.writer.pieces(self.quote)
        return sequence([*quote, text, *quote])

    def key(self, name: str) -> str:
        """Return the expression of a key."""
        return quoted(name)

    def any_key(self) -> str:
        """Return the expression of an undeclared key."""
        return self.writer.terminal("/[A-Za-z_][A-Za-z0-9_-]*/")


@dataclass(frozen=True, slots=True)
class PythonStrings:
    """Strings in double quotes, with escapes common to JSON and Python, or in single quotes."""

    writer: GrammarWriter

    def string(self, schema: Schema, conditions: Iterable[str], _limits: Limits) -> str:
        """Return the expression of the strings allowed by a schema."""
        required = list(conditions)
        plain = " & ".join([r"/[^'\\]*/", *required])
        escapes = r"""/([^'\\]|\\['\x22\\nrt])*/"""
        single = f'"\'" ({plain if required else escapes}) "\'"'
        return alternatives([self.writer.rule(json_value(schema)), self.writer.terminal(single)])

    def constant(self, text: str) -> str:
        """Return the expression of one string."""
        return alternatives(_quotations(text))

    def key(self, name: str) -> str:
        """Return the expression of a key."""
        return alternatives(_quotations(name))

    def any_key(self) -> str:
        """Return the expression of an undeclared key."""
        return self.writer.rule(json_value({"type": "string"}))


def strings_of(dialect: Literals, writer: GrammarWriter) -> LiteralStrings:
    """Return the way in which a dialect writes strings."""
    if dialect.has_escapes:
        return PythonStrings(writer)
    return RawStrings(dialect.quotes[0], writer)


def _quotations(text: str) -> Iterator[str]:
    yield quoted(json_text(text))
    if not _UNQUOTED & {*text}:
        yield quoted(f"'{text}'")
