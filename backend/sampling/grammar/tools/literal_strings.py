"""Strings and keys as literals, in a format's own quotes or in Python's."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from backend.formats.dialects import Literals
from backend.sampling.grammar.schema.tight import Schema
from backend.sampling.grammar.tools.json_values import json_text, json_value
from backend.sampling.grammar.writer import (
    GrammarWriter,
    alternatives,
    chain,
    escaped,
    quoted,
    sequence,
)

_UNQUOTED = frozenset("'\\")


class LiteralStrings(Protocol):
    """Writes strings."""

    def string(self, schema: Schema, conditions: Iterable[str], writer: GrammarWriter) -> str:
        """Return the expression of the strings allowed by a schema.

        Args:
            schema: A schema of type string.
            conditions: Terminals that express the same conditions on the text.
            writer: Collects the definitions.
        """

    def constant(self, text: str, writer: GrammarWriter) -> str:
        """Return the expression of one string."""

    def key(self, name: str, writer: GrammarWriter) -> str:
        """Return the expression of an object key inside a value."""

    def any_key(self, writer: GrammarWriter) -> str:
        """Return the expression of an undeclared key."""


@dataclass(frozen=True, slots=True)
class RawStrings:
    """Raw text in the format's own quotes, and bare keys."""

    quote: str

    def string(self, _schema: Schema, conditions: Iterable[str], writer: GrammarWriter) -> str:
        """Return the expression of the strings allowed by a schema."""
        refused = f"~/(?s:.*){escaped(self.quote)}(?s:.*)/"
        body = " & ".join(["/(?s:.)*/", refused, *conditions])
        first, *rest = writer.pieces(self.quote)
        closer = quoted(first) if isinstance(first, str) else ""
        text = writer.terminal(chain(f"({body})", closer))
        return chain(writer.text(self.quote), text, sequence(rest if closer else [first]))

    def constant(self, text: str, writer: GrammarWriter) -> str:
        """Return the expression of one string."""
        quote = writer.pieces(self.quote)
        return sequence([*quote, text, *quote])

    def key(self, name: str, _writer: GrammarWriter) -> str:
        """Return the expression of a key."""
        return quoted(name)

    def any_key(self, writer: GrammarWriter) -> str:
        """Return the expression of an undeclared key."""
        return writer.terminal("/[A-Za-z_][A-Za-z0-9_-]*/")


@dataclass(frozen=True, slots=True)
class PythonStrings:
    """Strings in double quotes, with escapes common to JSON and Python, or in single quotes."""

    def string(self, schema: Schema, conditions: Iterable[str], writer: GrammarWriter) -> str:
        """Return the expression of the strings allowed by a schema."""
        required = list(conditions)
        plain = " & ".join([r"/[^'\\]*/", *required])
        escapes = r"""/([^'\\]|\\['\x22\\nrt])*/"""
        single = f'"\'" ({plain if required else escapes}) "\'"'
        return alternatives([writer.rule(json_value(schema)), writer.terminal(single)])

    def constant(self, text: str, _writer: GrammarWriter) -> str:
        """Return the expression of one string."""
        return alternatives(_quotations(text))

    def key(self, name: str, _writer: GrammarWriter) -> str:
        """Return the expression of a key."""
        return alternatives(_quotations(name))

    def any_key(self, writer: GrammarWriter) -> str:
        """Return the expression of an undeclared key."""
        return writer.rule(json_value({"type": "string"}))


def strings_of(dialect: Literals) -> LiteralStrings:
    """Return the way in which a dialect writes strings."""
    return PythonStrings() if dialect.has_escapes else RawStrings(dialect.quotes[0])


def _quotations(text: str) -> Iterator[str]:
    yield quoted(json_text(text))
    if not _UNQUOTED & {*text}:
        yield quoted(f"'{text}'")
