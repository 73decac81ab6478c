"""Arguments as named literals, `a="x", n=2` or `a:<|"|>x<|"|>,n:2`."""

from collections.abc import Callable, Iterator, Sequence

from backend.formats.closing import Limits, bracket_limits, quote_limits
from backend.formats.dialects import Literals
from backend.formats.template import text_of
from backend.sampling.grammar.schema.patterns import PatternError, string_terminals
from backend.sampling.grammar.schema.tight import AnySchema
from backend.sampling.grammar.tools.json_values import json_part, json_text, json_value
from backend.sampling.grammar.tools.kinds import Kind, arguments, kinds, properties
from backend.sampling.grammar.tools.literal_strings import strings_of
from backend.sampling.grammar.tools.parameters import Parameters
from backend.sampling.grammar.tools.site import CallSite
from backend.sampling.grammar.tools.template import fill
from backend.sampling.grammar.writer import (
    GrammarWriter,
    alternatives,
    chain,
    quoted,
    repeated,
    sequence,
)

_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")
_OF_ARRAYS = ("items", "minItems", "maxItems")


def literal_arguments(
    dialect: Literals, site: CallSite, parameters: Parameters, writer: GrammarWriter
) -> str:
    """Return the expression of a tool's arguments as named literals, and of what follows them.

    Raises:
        GrammarError: A parameter cannot be enforced; the message says which.
    """
    after = sequence(fill(site.after, {}, writer))
    return chain(_Literals(dialect, site, parameters, writer).arguments(), after)


class _Literals:
    """Writes the expressions of one tool's values."""

    def __init__(
        self, dialect: Literals, site: CallSite, parameters: Parameters, writer: GrammarWriter
    ) -> None:
        self._dialect = dialect
        self._strings = strings_of(dialect, writer)
        self._limits = quote_limits(dialect, site.reading, site.opener)
        self._assign = text_of(dialect.argument)
        self._parameters = parameters
        self._writer = writer

    def arguments(self) -> str:
        # A comma and a key are one terminal: only the key tells readers that a string has ended.
        return alternatives(
            self._members(
                kind, lambda comma, name: quoted(comma + name + self._assign), self._limits
            )
            for kind in arguments(self._parameters)
        )

    def _members(self, kind: Kind, begin: Callable[[str, str], str], limits: Limits) -> str:
        """Return the expression of an object's properties, separated by commas."""
        found = properties(kind, self._parameters)
        if self._dialect.sorts_names:
            found.sort(key=lambda item: item.name.lower())
        first, after = "", ""
        for item in reversed(found):
            value = self._writer.rule(self._value(item.pointer, item.schema, limits))
            alone = chain(begin("", item.name), value, after)
            first = self._writer.rule(alternatives([alone] if item.is_required else [alone, first]))
            member = chain(begin(self._dialect.comma, item.name), value)
            after = self._writer.rule(chain(repeated(member, int(item.is_required), 1), after))
        return first

    def _value(self, pointer: str, schema: AnySchema, limits: Limits) -> str:
        found = kinds(pointer, schema, self._parameters)
        return alternatives(expression for kind in found for expression in self._ways(kind, limits))

    def _ways(self, kind: Kind, limits: Limits) -> Iterator[str]:
        """Yield the expressions of a kind of value."""
        if "const" in kind.schema:
            yield self._constant(kind.schema["const"])
            return
        match sorted(kind.types):
            case ["string"]:
                yield self._string(kind, limits)
            case ["integer" | "number"]:
                self._require_only(kind, _OF_NUMBERS)
                yield self._writer.rule(json_part(kind.schema, self._parameters))
            case ["boolean"]:
                yield self._spelled("true", "false")
            case ["null"]:
                yield self._spelled("null")
            case ["array"]:
                self._require_only(kind, _OF_ARRAYS)
                yield self._recursive(kind, self._array)
            case ["object"]:
                yield self._recursive(kind, self._object)
            case _:
                self._require_only(kind, ())
                yield self._any_value(limits)

    def _recursive(self, kind: Kind, body: Callable[[Kind], str]) -> str:
        key = f"{self._parameters.tool} {kind.pointer} {min(kind.types)}"
        return self._writer.recursive_rule(key, lambda: body(kind))

    def _string(self, kind: Kind, limits: Limits) -> str:
        self._require_only(kind, _OF_STRINGS)
        try:
            conditions = list(string_terminals(kind.schema))
        except PatternError as error:
            raise self._parameters.error(f"{kind.pointer}/pattern", str(error)) from error
        return self._strings.string(kind.schema, conditions, limits)

    def _array(self, kind: Kind) -> str:
        item = self._value(
            f"{kind.pointer}/items", kind.schema.get("items", True), self._inside("]")
        )
        return self._list(item, kind.schema.get("minItems", 0), kind.schema.get("maxItems"))

    def _list(self, item: str, least: int = 0, most: int | None = None) -> str:
        if most == 0:
            return quoted("[]")
        next_item = chain(quoted(self._dialect.comma), item)
        items = chain(
            item, repeated(next_item, max(least - 1, 0), None if most is None else most - 1)
        )
        return chain(quoted("["), repeated(items, min(least, 1), 1), quoted("]"))

    def _object(self, kind: Kind) -> str:
        others = kind.schema.get("additionalProperties", True)
        if not kind.schema.get("properties") and others is not False:
            self._require_only(kind, ("properties", "additionalProperties"))
            pointer = f"{kind.pointer}/additionalProperties"
            return self._any_object(self._value(pointer, others, self._inside("}")))
        members = self._members(kind, self._later_key, self._inside("}"))
        return chain(quoted("{"), members, quoted("}"))

    def _inside(self, bracket: str) -> Limits:
        return bracket_limits(self._dialect, bracket)

    def _later_key(self, comma: str, name: str) -> str:
        return chain(quoted(comma), self._key(name))

    def _key(self, name: str) -> str:
        return chain(self._strings.key(name), quoted(self._dialect.colon))

    def _any_object(self, value: str) -> str:
        """Return the expression of an object with arbitrary keys."""
        member = chain(self._strings.any_key(), quoted(self._dialect.colon), value)
        members = chain(member, repeated(chain(quoted(self._dialect.comma), member), 0, None))
        return chain(quoted("{"), repeated(members, 0, 1), quoted("}"))

    def _any_value(self, limits: Limits) -> str:
        return self._writer.recursive_rule(
            f"any value {limits}", lambda: alternatives(self._any_ways(limits))
        )

    def _any_ways(self, limits: Limits) -> Iterator[str]:
        yield self._strings.string({"type": "string"}, (), limits)
        yield self._writer.rule(json_value({"type": "number"}))
        yield self._spelled("true", "false", "null")
        yield self._list(self._any_value(self._inside("]")))
        yield self._any_object(self._any_value(self._inside("}")))

    def _spelled(self, *constants: str) -> str:
        ways = [quoted(way) for constant in constants for way in self._dialect.constants[constant]]
        return alternatives(ways)

    def _constant(self, value: object) -> str:
        """Return the expression of a single value."""
        comma = quoted(self._dialect.comma)
        match value:
            case str():
                return self._strings.constant(value)
            case list():
                return chain(quoted("["), _joined(comma, map(self._constant, value)), quoted("]"))
            case dict():
                members = (chain(self._key(key), self._constant(v)) for key, v in value.items())
                return chain(quoted("{"), _joined(comma, members), quoted("}"))
        text = json_text(value)
        return self._spelled(text) if text in self._dialect.constants else quoted(text)

    def _require_only(self, kind: Kind, keywords: Sequence[str]) -> None:
        for keyword in sorted(kind.constraints(*keywords)):
            raise self._parameters.error(
                f"{kind.pointer}/{keyword}", "cannot be enforced in this format"
            )


def _joined(separator: str, expressions: Iterator[str]) -> str:
    return f" {separator} ".join(expressions)
