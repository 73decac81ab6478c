"""A JSON schema's conditions on strings, as terminals that must all match."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeAlias

from backend.sampling.grammar.writer import escaped

_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL})*"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_HEX = "[0-9a-fA-F]"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P([0-9]+W|[0-9]+[YMD]|([0-9]+D)?T[0-9]+[HMS])",
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": rf"({_HEX}{{1,4}}:){{7}}{_HEX}{{1,4}}|::({_HEX}{{1,4}}:){{0,5}}{_HEX}{{1,4}}|::",
    "uuid": rf"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~:\x2f?#\[\]@!$&'()*+,;=%-]+",
}
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)


class PatternError(ValueError):
    """The pattern cannot be enforced."""


def string_terminals(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the terminals that a string must match.

    Raises:
        PatternError: llguidance does not support the pattern.
    """
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        yield f"/(?s:.){{{least},{most}}}/"
    if schema.get("format") in _FORMATS:
        yield f"/{_FORMATS[schema['format']]}/"
    if "pattern" in schema:
        yield f"/{_searched(schema['pattern'])}/"


@cache
def without_tags(tags: tuple[str, ...]) -> str:
    """Return a pattern of text without these tags, each of which starts with its only "<"."""
    begun, left = _prefixes(tags), []
    for prefix in begun:
        following = {tag[len(prefix)] for tag in tags if tag.startswith(prefix)}
        left.append(f"{escaped(prefix)}[^<{''.join(map(escaped, sorted(following)))}]")
    some = f"(?:{'|'.join(map(escaped, begun))})*"
    return f"^(?:[^<]|{some}(?:{'|'.join(left)}))*{some}$"


def _prefixes(tags: tuple[str, ...]) -> list[str]:
    """Return the possible beginnings of these tags, without any complete tag."""
    prefixes = {tag[:length] for tag in tags for length in range(1, len(tag))}
    return sorted(prefix for prefix in prefixes if not prefix.startswith(tags))


def _searched(pattern: str) -> str:
    """Return a pattern for whole texts that contain a match of a pattern."""
    tokens = _TOKEN.findall(pattern)
    starts, ends = tokens[:1] == ["^"], tokens[-1:] == ["$"]
    inner = tokens[starts : len(tokens) - ends]
    if {"^", "$"} & {*inner} or ((starts or ends) and _has_choice(inner)):
        raise PatternError(f"the pattern {pattern!r} has anchors inside")
    body = "".join({"/": r"\/", "\n": r"\n"}.get(token, token) for token in inner)
    before, after = ("" if is_there else "(?s:.*)" for is_there in (starts, ends))
    return f"{before}(?:{body}){after}"


def _has_choice(tokens: list[str]) -> bool:
    """Return whether there are alternatives outside all brackets."""
    depth = 0
    for part in tokens:
        depth += (part == "(") - (part == ")")
        if part == "|" and not depth:
            return True
    return False


Schema: TypeAlias = Mapping[str, Any]
# True allows any value, false none.
AnySchema: TypeAlias = Schema | bool

# Doubles represent integers up to here exactly.
_LARGEST = 10**15 - 1
_FINEST = 1e-9
_NUMERIC = frozenset({"integer", "number"})
_GIVEN = frozenset({"const", "enum"})
_KEYS = frozenset({"properties", "additionalProperties", "patternProperties"})
_CHOICES = frozenset({"anyOf", "oneOf"})
_COMBINATIONS = _CHOICES | {"$ref", "allOf"}
_ONE = frozenset({"items", "additionalProperties", "additionalItems"})
_LISTS = _CHOICES | {"prefixItems", "items"}
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "$comment"}
)
_RESTRICTING = frozenset({"type", "required"}).union(
    *(_GIVEN, _KEYS, _COMBINATIONS, _ONE, _LISTS),
    *(("pattern", "format", "multipleOf"), ("minimum", "maximum")),
    *(("exclusiveMinimum", "exclusiveMaximum"), ("minLength", "maxLength")),
    *(("minItems", "maxItems"), ("minProperties", "maxProperties")),
)
_DEFINITIONS = "$defs"
_ANY = "x-any-value"
_ANY_VALUE: Schema = {"$ref": f"#/{_DEFINITIONS}/{_ANY}"}
_ANY_TYPES = ("string", "number", "boolean", "null", "array", "object")


def tightened(schema: Schema, forbidden: tuple[str, ...] = ()) -> Schema:
    """Return a slightly stricter schema.

    Args:
        schema: A complete schema, with the definitions that it refers to.
        forbidden: Tags that no string or key contains; each starts with its only "<".
    """
    tight = _Tightening(forbidden)
    return tight.with_any_value(tight.whole(schema))


def with_short_numbers(schema: Schema) -> Schema:
    """Return a schema whose parts that allow any value allow no endless numbers.

    Parts that say what they allow are left as they are, and so are combinations of schemas.
    """
    opening = _Opening(())
    return opening.with_any_value(opening.part(schema))


def type_names(schema: Schema) -> frozenset[str]:
    """Return the names in a schema's `type`, which may be a list or missing."""
    value = schema.get("type", [])
    return frozenset([value] if isinstance(value, str) else value)


class _Tightening:
    """Copies a schema while making it stricter."""

    def __init__(self, forbidden: tuple[str, ...]) -> None:
        self._pattern = without_tags(forbidden) if forbidden else ""
        self._has_any_value = False

    def with_any_value(self, root: Schema) -> Schema:
        """Return the copy with the definition of any value, if it refers to it."""
        if not self._has_any_value:
            return root
        any_value = {"anyOf": [_Tightening.whole(self, {"type": name}) for name in _ANY_TYPES]}
        return {**root, _DEFINITIONS: {**root.get(_DEFINITIONS, {}), _ANY: any_value}}

    def schema(self, schema: AnySchema) -> AnySchema:
        if schema is False:
            return False
        if schema is True or schema.keys() <= _ANNOTATIONS:
            return self._any_value()
        return self.whole(schema)

    def whole(self, schema: Schema) -> dict[str, Any]:
        """Return a stricter copy of a schema."""
        names = type_names(schema)
        # The parts of a combination apply together: none of them may be closed.
        is_alone = not (names or _KEYS & schema.keys())
        tight = {
            keyword: value if keyword in _CHOICES and not is_alone else self._part(keyword, value)
            for keyword, value in schema.items()
        }
        if _GIVEN & tight.keys():
            return tight
        if names & _NUMERIC:
            _bound(tight, is_fractional="number" in names)
        if "array" in names and not {"items", "prefixItems"} & tight.keys():
            tight["items"] = self._any_value()
        if "object" in names and not _COMBINATIONS & tight.keys():
            self._restrict_keys(tight)
        if "string" in names and self._pattern:
            self._restrict_text(tight)
        return tight

    def _part(self, keyword: str, value: object) -> object:
        if keyword in _LISTS and isinstance(value, list):
            return [self.schema(part) for part in value]
        if keyword in _NAMED and isinstance(value, Mapping):
            return {name: self.schema(part) for name, part in value.items()}
        if keyword in _ONE and isinstance(value, Mapping | bool):
            return self.schema(value)
        return value

    def _any_value(self) -> Schema:
        self._has_any_value = True
        return _ANY_VALUE

    def _restrict_keys(self, tight: dict[str, Any]) -> None:
        """Close an object that declares its keys; others allow any keys without tags."""
        if "patternProperties" in tight:
            return
        if "additionalProperties" not in tight:
            tight["additionalProperties"] = not tight.get("properties") and self._any_value()
        others = tight["additionalProperties"]
        if self._pattern and others is not False:
            tight["patternProperties"] = {self._pattern: others}
            tight["additionalProperties"] = False

    def _restrict_text(self, tight: dict[str, Any]) -> None:
        if "pattern" in tight:
            tight["allOf"] = [*tight.get("allOf", ()), {"pattern": self._pattern}]
        elif "format" not in tight:
            tight["pattern"] = self._pattern


class _Opening(_Tightening):
    """Copies a schema while it spells out where any value is allowed."""

    def schema(self, schema: AnySchema) -> AnySchema:
        if isinstance(schema, bool):
            return self._any_value() if schema else False
        return self.part(schema)

    def part(self, schema: Schema) -> Schema:
        """Return a copy of a schema that is an object."""
        if not _RESTRICTING & schema.keys():
            return {**schema, **self._any_value()}
        return self.whole(schema)

    def whole(self, schema: Schema) -> dict[str, Any]:
        """Return a copy of a schema."""
        copy = {keyword: self._part(keyword, value) for keyword, value in schema.items()}
        names = type_names(schema)
        if (_GIVEN | _COMBINATIONS) & copy.keys():
            return copy
        if "array" in names and not {"items", "prefixItems"} & copy.keys():
            copy["items"] = self._any_value()
        if "object" in names:
            copy.setdefault("additionalProperties", self._any_value())
        return copy


def _bound(tight: dict[str, Any], *, is_fractional: bool) -> None:
    """Limit the digits of a number."""
    if not {"minimum", "exclusiveMinimum"} & tight.keys():
        tight["minimum"] = min(-_LARGEST, tight.get("maximum", 0))
    if not {"maximum", "exclusiveMaximum"} & tight.keys():
        tight["maximum"] = max(_LARGEST, tight.get("minimum", 0))
    if is_fractional:
        tight.setdefault("multipleOf", _FINEST)
