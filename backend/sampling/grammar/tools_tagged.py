"""Arguments in tags with raw values between them, `<parameter=a>…</parameter>`.

A string is its text, without quotes or escapes; anything else is JSON. Where the schema allows
both, a text that would be read as the other is refused.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from backend.sampling.grammar.call_template import Slot, Template, fill
from backend.sampling.grammar.string_pattern import PatternError, string_terminals
from backend.sampling.grammar.tool_parameters import Parameters
from backend.sampling.grammar.tool_schema import Kind, Property, arguments, kinds, properties
from backend.sampling.grammar.tools_json import json_part, json_text
from backend.sampling.grammar.writer import (
    Expression,
    GrammarWriter,
    Piece,
    alternatives,
    chain,
    escaped,
    quoted,
    repeated,
    sequence,
)

_SPACE = r"[\s\x1C-\x1F\\]*"
_SIGNS = r"[-+.(\s\x1C-\x1F\\]*"
_NUMBER = rf"{_SIGNS}[0-9](?s:.*)"
# What a reader takes for a value of the type rather than for a string.
_LOOKS = {
    "null": rf"{_SPACE}(?i:null|none){_SPACE}",
    "boolean": rf"{_SPACE}(?i:true|false){_SPACE}",
    "integer": _NUMBER,
    "number": _NUMBER,
    "object": rf"{_SIGNS}\{{(?s:.*)",
    "array": rf"{_SIGNS}([0-9\[{{(]|[uUrR]?[\x22']|(True|False|None)[\s,])(?s:.*)",
}
_CONSTANTS = {"null": ("null",), "boolean": ("true", "false")}
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedArguments:
    """How arguments stand in tags.

    Attributes:
        begin: What stands before a value.
        begin_json: The same before one that is no string, where the tags tell.
        end: What stands behind it; begins with a text.
        taboos: Texts that cannot be a part of a string.
        verbatim: What stands around a string with one of `special` in it.
        special: Characters that no other string has.
    """

    begin: Template
    begin_json: Template = ()
    end: Template
    taboos: tuple[str, ...]
    verbatim: tuple[str, str] = ("", "")
    special: str = ""

    def __call__(self, parameters: Parameters, writer: GrammarWriter) -> str:
        """Return the expression of the arguments of a tool.

        Raises:
            GrammarError: They cannot be enforced; the message says which.
        """
        found = properties(arguments(parameters), parameters)
        return chain(*(_Argument(item, self, parameters, writer).write() for item in found))


class _Argument:
    """Writes the expression of one argument."""

    def __init__(
        self,
        item: Property,
        style: TaggedArguments,
        parameters: Parameters,
        writer: GrammarWriter,
    ) -> None:
        self._item = item
        self._style = style
        self._parameters = parameters
        self._writer = writer
        self._kinds = kinds(item.pointer, item.schema, parameters)
        self._types = frozenset[str]().union(*(kind.types for kind in self._kinds))
        self._end = list(fill(style.end, {}, writer))

    def write(self) -> str:
        whole = alternatives(self._ways())
        return repeated(self._writer.rule(whole), int(self._item.is_required), 1)

    def _ways(self) -> Iterator[str]:
        """Yield the expressions of the argument as a text and as JSON."""
        texts = [kind for kind in self._kinds if kind.is_text]
        others = [kind for kind in self._kinds if not kind.is_text]
        if texts and not self._style.begin_json:
            # What a text could begin with must be read in one piece with it.
            texts += [kind for kind in others if self._constants(kind)]
            others = [kind for kind in others if not self._constants(kind)]
        if texts:
            yield self._tagged(self._style.begin, self._spelled(texts))
        if others:
            schema = self._json_schema(others)
            value = self._writer.rule(json_part(schema, self._parameters, self._style.taboos))
            begin = self._style.begin_json or self._style.begin
            yield self._tagged(begin, [Expression(value), *self._end])

    def _tagged(self, begin: Template, value: list[Piece]) -> str:
        key = {Slot.KEY: self._item.name}
        return sequence([*fill(begin, key, self._writer), *value])

    def _json_schema(self, others: list[Kind]) -> dict[str, object]:
        if len(others) == len(self._kinds) and isinstance(self._item.schema, dict):
            return dict(self._item.schema)
        return {"anyOf": [dict(kind.schema) for kind in others]}

    def _spelled(self, texts: list[Kind]) -> list[Piece]:
        """Return the texts and what follows them, as far as it is spelled out in one terminal."""
        first, *rest = self._end
        closer = quoted(first) if isinstance(first, str) else ""
        rest = rest if closer else self._end
        bodies = alternatives(body for kind in texts for body in self._bodies(kind))
        return [Expression(self._writer.terminal(chain(bodies, closer))), *rest]

    def _bodies(self, kind: Kind) -> Iterator[str]:
        """Yield the terminals of a kind of text, or of a value that is no text."""
        constants = self._constants(kind)
        if constants:
            yield from (self._constant(text, kind) for text in constants)
            return
        conditions = list(self._conditions(kind))
        begin, end = self._style.verbatim
        if begin:
            yield f"{quoted(begin)} ({_all_of(conditions, [_has(end)])}) {quoted(end)}"
            conditions.append(f"~/(?s:.*)[{escaped(self._style.special)}](?s:.*)/")
        yield f"({_all_of(conditions, [_has(*self._style.taboos)])})"

    def _conditions(self, kind: Kind) -> Iterator[str]:
        """Yield terminals that must all hold for a string."""
        for keyword in sorted(kind.constraints(*_OF_STRINGS)):
            raise self._parameters.error(
                f"{kind.pointer}/{keyword}", "cannot be enforced for a string in this wire"
            )
        yield from (f"~/{_LOOKS[other]}/" for other in self._other_looks())
        try:
            yield from string_terminals(kind.schema)
        except PatternError as error:
            raise self._parameters.error(f"{kind.pointer}/pattern", str(error)) from error

    def _other_looks(self) -> list[str]:
        """Return the types that a reader could take a string for."""
        is_told = bool(self._style.begin_json) or "string" not in self._types
        return [] if is_told else sorted(self._types - {"string"})

    def _constants(self, kind: Kind) -> tuple[str, ...]:
        """Return the few texts of a kind, if it has no others."""
        if "const" in kind.schema:
            value = kind.schema["const"]
            return (value if isinstance(value, str) else json_text(value),)
        return next((_CONSTANTS[name] for name in kind.types if name in _CONSTANTS), ())

    def _constant(self, text: str, kind: Kind) -> str:
        if kind.is_text:
            looks = (name for name in self._other_looks() if re.fullmatch(_LOOKS[name], text))
            if look := next(looks, ""):
                raise self._parameters.error(kind.pointer, f"{text!r} would be read as {look}")
        begin, end = self._style.verbatim if {*self._style.special} & {*text} else ("", "")
        if taboo := next((t for t in self._taboos(end) if t in text), ""):
            raise self._parameters.error(kind.pointer, f"a value holds {taboo!r}")
        return quoted(begin + text + end) or '""'

    def _taboos(self, end: str) -> tuple[str, ...]:
        return (end,) if end else self._style.taboos


def _has(*texts: str) -> str:
    return f"/(?s:.*)({'|'.join(map(escaped, texts))})(?s:.*)/"


def _all_of(conditions: list[str], refused: list[str]) -> str:
    return " & ".join(["/(?s:.)*/", *conditions, *(f"~{terminal}" for terminal in refused)])
