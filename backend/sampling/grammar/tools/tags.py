"""Arguments in tags around raw values, `<parameter=a>…</parameter>`.

Strings are raw text, without quotes or escapes; everything else is JSON. Where the schema allows
both, text that would be read as the other is refused.
"""

import re
from collections.abc import Iterator

from backend.formats.dialects import Tags
from backend.formats.template import ARGUMENTS, KEY, TYPE, VALUE, split_at, text_of
from backend.sampling.grammar.schema.patterns import PatternError, string_terminals
from backend.sampling.grammar.tools.json_values import json_part, json_text
from backend.sampling.grammar.tools.kinds import Kind, Property, arguments, kinds, properties
from backend.sampling.grammar.tools.parameters import Parameters
from backend.sampling.grammar.tools.template import fill
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
# Texts that a reader takes for a value of the type rather than for a string.
_LOOKS = {
    "null": rf"{_SPACE}(?i:null|none){_SPACE}",
    "boolean": rf"{_SPACE}(?i:true|false){_SPACE}",
    "integer": _NUMBER,
    "number": _NUMBER,
    "object": rf"{_SIGNS}\{{(?s:.*)",
    "array": rf"{_SIGNS}([0-9\[{{(]|[uUrR]?[\x22']|(True|False|None)[\s,])(?s:.*)",
}
_ARRAY = frozenset({"array"})
_NESTED = (_ARRAY, frozenset({"object"}))
_CONSTANTS = {"null": ("null",), "boolean": ("true", "false")}
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")


def tagged_arguments(
    dialect: Tags, forbidden: tuple[str, ...], parameters: Parameters, writer: GrammarWriter
) -> str:
    """Return the expression of a tool's arguments in tags.

    Values contain neither the forbidden texts nor the tags of arguments and calls.

    Raises:
        PartError: A parameter cannot be enforced.
    """
    texts = _forbidden(dialect, forbidden)
    found = [properties(kind, parameters) for kind in arguments(parameters)]
    return alternatives(
        chain(*(_Argument(item, dialect, texts, parameters, writer).write() for item in items))
        for items in found
    )


class _Argument:
    """Writes the expression of one argument."""

    def __init__(
        self,
        item: Property,
        dialect: Tags,
        forbidden: tuple[str, ...],
        parameters: Parameters,
        writer: GrammarWriter,
    ) -> None:
        self._item = item
        self._dialect = dialect
        self._forbidden = forbidden
        self._begin, end = split_at(dialect.parameter, VALUE)
        self._parameters = parameters
        self._writer = writer
        self._kinds = kinds(item.pointer, item.schema, parameters)
        self._types = frozenset[str]().union(*(kind.types for kind in self._kinds))
        self._end = list(fill(end, {KEY: item.name}, writer))

    def write(self) -> str:
        whole = alternatives(self._ways())
        return repeated(self._writer.rule(whole), int(self._item.is_required), 1)

    def _ways(self) -> Iterator[str]:
        """Yield the expressions of the argument as text and as JSON."""
        texts = [kind for kind in self._kinds if kind.is_text]
        others = [kind for kind in self._kinds if not kind.is_text]
        if texts and not self._dialect.types:
            # Values that a text could begin with must be in the same terminal.
            texts += [kind for kind in others if self._constants(kind)]
            others = [kind for kind in others if not self._constants(kind)]
        if texts:
            yield self._tagged("string", self._spelled(texts))
        for name, kinds_of_type in self._by_type(others).items():
            value = self._nested if self._dialect.mark else self._json
            yield self._tagged(name, [Expression(value(kinds_of_type)), *self._end])

    def _by_type(self, others: list[Kind]) -> dict[str, list[Kind]]:
        """Return the kinds grouped by the type names that tags can state."""
        found: dict[str, tuple[str, list[Kind]]] = {}
        for kind in others:
            name = kind.type_name
            _, group = found.setdefault(self._dialect.types.get(name, ""), (name, []))
            group.append(kind)
        return dict(found.values())

    def _tagged(self, type_name: str, value: list[Piece]) -> str:
        values = {KEY: self._item.name, TYPE: self._dialect.types.get(type_name, "")}
        return sequence([*fill(self._begin, values, self._writer), *value])

    def _nested(self, others: list[Kind]) -> str:
        """Return the expression of values whose objects and arrays are nested elements."""
        nested = [kind for kind in others if kind.types in _NESTED and "const" not in kind.schema]
        if nested and len(self._kinds) > 1 and self._types - {*nested[0].types, "null"}:
            raise self._parameters.error(
                nested[0].pointer, "elements would be read as a value of another type"
            )
        scalars = [kind for kind in others if kind not in nested]
        ways = [self._json(scalars)] if scalars else []
        return alternatives([*ways, *map(self._elements, nested)])

    def _elements(self, kind: Kind) -> str:
        key = f"{self._parameters.tool} {kind.pointer} {min(kind.types)}"
        body = self._items if kind.types == _ARRAY else self._members
        return self._writer.recursive_rule(key, lambda: body(kind) or '""')

    def _items(self, kind: Kind) -> str:
        for keyword in sorted(kind.constraints("items", "minItems", "maxItems")):
            raise self._parameters.error(f"{kind.pointer}/{keyword}", "cannot be enforced here")
        schema = kind.schema.get("items", True)
        item = self._argument(Property("item", f"{kind.pointer}/items", schema, is_required=True))
        return repeated(item, kind.schema.get("minItems", 0), kind.schema.get("maxItems"))

    def _members(self, kind: Kind) -> str:
        others = kind.schema.get("additionalProperties", True)
        if not kind.schema.get("properties") and others is not False:
            return self._json([kind])
        return chain(*map(self._argument, properties(kind, self._parameters)))

    def _argument(self, item: Property) -> str:
        inner = _Argument(item, self._dialect, self._forbidden, self._parameters, self._writer)
        return inner.write()

    def _json(self, others: list[Kind]) -> str:
        """Return the expression of values that are not text."""
        forbidden = tuple(dict.fromkeys(map(_one_tag, self._forbidden)))
        schema = self._json_schema(others)
        return self._writer.rule(json_part(schema, self._parameters, forbidden))

    def _json_schema(self, others: list[Kind]) -> dict[str, object]:
        if len(others) == len(self._kinds) and isinstance(self._item.schema, dict):
            return dict(self._item.schema)
        return {"anyOf": [dict(kind.schema) for kind in others]}

    def _spelled(self, texts: list[Kind]) -> list[Piece]:
        """Return the texts and their end, as far as one terminal spells it out."""
        first, *rest = self._end
        closer = quoted(first) if isinstance(first, str) else ""
        rest = rest if closer else self._end
        bodies = alternatives(body for kind in texts for body in self._bodies(kind))
        return [Expression(self._writer.terminal(chain(bodies, closer))), *rest]

    def _bodies(self, kind: Kind) -> Iterator[str]:
        """Yield the terminals of a kind of text, or of a value that is not text."""
        constants = self._constants(kind)
        if constants:
            yield from (self._constant(text, kind) for text in constants)
            return
        conditions = list(self._conditions(kind))
        begin, end = self._dialect.verbatim
        if begin:
            yield f"{quoted(begin)} ({_all_of(conditions, [_has(end)])}) {quoted(end)}"
            conditions.append(f"~/(?s:.*)[{escaped(self._dialect.special)}](?s:.*)/")
        yield f"({_all_of(conditions, [_has(*self._forbidden)])})"

    def _conditions(self, kind: Kind) -> Iterator[str]:
        """Yield terminals that a string must all match."""
        for keyword in sorted(kind.constraints(*_OF_STRINGS)):
            raise self._parameters.error(
                f"{kind.pointer}/{keyword}", "cannot be enforced for a string in this format"
            )
        yield from (f"~/{_LOOKS[other]}/" for other in self._other_looks())
        try:
            yield from string_terminals(kind.schema)
        except PatternError as error:
            raise self._parameters.error(f"{kind.pointer}/pattern", str(error)) from error

    def _other_looks(self) -> list[str]:
        """Return the types that a reader could mistake a string for."""
        is_told = bool(self._dialect.types) or "string" not in self._types
        return [] if is_told else sorted(self._types - {"string"})

    def _constants(self, kind: Kind) -> tuple[str, ...]:
        """Return the texts of a kind that has only a few, or none."""
        if "const" in kind.schema:
            value = kind.schema["const"]
            return (value if isinstance(value, str) else json_text(value),)
        return next((_CONSTANTS[name] for name in kind.types if name in _CONSTANTS), ())

    def _constant(self, text: str, kind: Kind) -> str:
        if kind.is_text:
            looks = (name for name in self._other_looks() if re.fullmatch(_LOOKS[name], text))
            if look := next(looks, ""):
                raise self._parameters.error(kind.pointer, f"{text!r} would be read as {look}")
        begin, end = self._dialect.verbatim if {*self._dialect.special} & {*text} else ("", "")
        if found := next((t for t in self._forbidden_before(end) if t in text), ""):
            raise self._parameters.error(kind.pointer, f"a value contains {found!r}")
        return quoted(begin + text + end) or '""'

    def _forbidden_before(self, end: str) -> tuple[str, ...]:
        return (end,) if end else self._forbidden


def _forbidden(dialect: Tags, others: tuple[str, ...]) -> tuple[str, ...]:
    """Return the texts that a reader could mistake for the end of a value."""
    if dialect.mark:
        return (dialect.mark,)
    begin, end = split_at(dialect.parameter, VALUE)
    _, call_end = split_at(dialect.call, ARGUMENTS)
    tags = (text_of(end).strip(), str(begin[0]).partition(" name=")[0], text_of(call_end).strip())
    return tuple(dict.fromkeys((*tags, *others)))


def _one_tag(text: str) -> str:
    """Return the part of a text that starts with its only "<"."""
    begin = text.index("<")
    end = text.find("<", begin + 1)
    return text[begin:] if end < 0 else text[begin:end]


def _has(*texts: str) -> str:
    return f"/(?s:.*)({'|'.join(map(escaped, texts))})(?s:.*)/"


def _all_of(conditions: list[str], refused: list[str]) -> str:
    return " & ".join(["/(?s:.)*/", *conditions, *(f"~{terminal}" for terminal in refused)])
