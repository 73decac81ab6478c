"""Keywords of JSON schemas that hold, and the values they may have.

Tools come from everywhere: their keywords are misspelled, null, of another draft or of another
language. A keyword that means something is read, and any other dropped.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_JSON_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_SPELLINGS = {
    "string": "str text char character varchar date time datetime timestamp uuid url uri email "
    "bytes binary base64 file path",
    "number": "float double decimal real float32 float64 numeric",
    "integer": "int long short bigint smallint int8 int16 int32 int64 uint uint8 uint32 uint64",
    "boolean": "bool",
    "object": "dict dictionary map mapping hash record struct json_object",
    "array": "list tuple set sequence iterable vector",
    "null": "none nonetype nil void",
}
_TYPE_NAMES = {name: name for name in _JSON_TYPES} | {
    spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings.split()
}
# `List[str]`, `dict<string, int>` and `string[]`.
_GENERIC = re.compile(r"(\w+)\s*[\[<(].+[\])>]")
_LIST_SUFFIX = "[]"

IMPLIED_TYPES: Mapping[str, frozenset[str]] = {
    "object": frozenset(
        {
            *("properties", "required", "additionalProperties", "patternProperties"),
            *("minProperties", "maxProperties"),
        }
    ),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"pattern", "format", "minLength", "maxLength"}),
    "number": frozenset(
        {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    ),
}
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
LENGTHS = (*("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),)
# They restrict values, but no grammar can express it.
LOST = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
    *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
    *("unevaluatedProperties", "unevaluatedItems", "contentSchema", "divisibleBy", "extends"),
    *("disallow",),
)
STRING_FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uuid", "uri"),
    }
)
# From OpenAPI and Rust; they tell how a number is stored, not how it is written.
NUMBER_FORMATS = frozenset(
    {
        *("int8", "int16", "int32", "int64", "uint", "uint8", "uint16", "uint32", "uint64"),
        *("float", "double"),
    }
)
_LARGEST = 10**15
_LONGEST = 10**6
_TOKEN = re.compile(r"\\(?:k<|.)|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:P=|<?[=!])|.", re.DOTALL)
_LOOKS = ("(?=", "(?!", "(?<=", "(?<!")
_REFERENCES = ("(?P=", r"\k<", *(rf"\{digit}" for digit in range(1, 10)))
_WORD_ENDS = (r"\b", r"\B")
_DELIMITED = re.compile(r"/.*[$^].*/[a-z]*|/.+/[gimsuvy]+", re.DOTALL)


class WrongValueError(ValueError):
    """A keyword has a value that cannot be enforced; the message does not quote it."""


def type_of_name(name: object) -> str:
    """Return the JSON type that a name means, in any usual spelling.

    Raises:
        WrongValueError: It means none, and therefore any.
    """
    if isinstance(name, str):
        word = name.strip().lower()
        if word.endswith(_LIST_SUFFIX):
            return "array"
        generic = _GENERIC.fullmatch(word)
        if found := _TYPE_NAMES.get(generic[1] if generic else word):
            return found
    raise WrongValueError("is no type of JSON: any value is allowed")


def _types(value: object) -> list[str]:
    names = value if isinstance(value, list) else [value]
    if isinstance(value, str) and "|" in value:
        names = value.split("|")
    if not names:
        raise WrongValueError("is empty")
    found = {type_of_name("null" if name is None and len(names) > 1 else name) for name in names}
    return sorted(found - {"integer"} if "number" in found else found)


def _bound(value: object) -> int | float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise WrongValueError("is no number")
    # Numbers have fewer digits anyway.
    return None if abs(value) > _LARGEST else value


def _lower(value: object) -> int | float | None:
    bound = _bound(value)
    if bound is None and isinstance(value, int | float) and value > 0:
        raise WrongValueError("is too large")
    return bound


def _upper(value: object) -> int | float | None:
    bound = _bound(value)
    if bound is None and isinstance(value, int | float) and value < 0:
        raise WrongValueError("is too small")
    return bound


def _multiple(value: object) -> int | float | None:
    multiple = _bound(value)
    if multiple is None or multiple <= 0:
        raise WrongValueError("is no positive number")
    return multiple


def _least(value: object) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise WrongValueError("is no length")
    if value > _LONGEST:
        raise WrongValueError("is too large")
    return value or None


def _most(value: object) -> int | None:
    try:
        return 0 if value == 0 and not isinstance(value, bool) else _least(value)
    except WrongValueError:
        if isinstance(value, int | float) and value > _LONGEST:
            return None
        raise


def _pattern(value: object) -> str | None:
    if not isinstance(value, str):
        raise WrongValueError("is no text")
    require_pattern(value)
    return value or None


def require_pattern(pattern: str) -> None:
    """Refuse a pattern with a construct that no grammar has.

    Raises:
        WrongValueError: It has one.
    """
    tokens = _TOKEN.findall(pattern)
    if any(token in _LOOKS for token in tokens):
        raise WrongValueError("looks ahead or behind")
    if any(token in _REFERENCES for token in tokens):
        raise WrongValueError("refers back")
    if any(token in _WORD_ENDS for token in tokens):
        raise WrongValueError("has word boundaries")
    if _DELIMITED.fullmatch(pattern):
        raise WrongValueError("is between slashes, as in a programming language")


def _format(value: object) -> str | None:
    if isinstance(value, str) and value in NUMBER_FORMATS:
        return None
    if not isinstance(value, str) or value not in STRING_FORMATS:
        raise WrongValueError("is not a known format")
    return value


def _enum(value: object) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise WrongValueError("is no list of values")
    return distinct(value)


def _required(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise WrongValueError("is no list of names")
    return list(dict.fromkeys(value))


def distinct(values: Iterable[Any]) -> list[Any]:
    """Return different JSON values in order."""
    found: dict[str, Any] = {}
    for value in values:
        found.setdefault(repr(value), value)
    return list(found.values())


# Return a keyword's value, or nothing if it restricts nothing.
VALUES: Mapping[str, Callable[[object], Any]] = {
    "type": _types,
    "enum": _enum,
    "required": _required,
    "pattern": _pattern,
    "format": _format,
    "multipleOf": _multiple,
    "minimum": _lower,
    "exclusiveMinimum": _lower,
    "maximum": _upper,
    "exclusiveMaximum": _upper,
    "minLength": _least,
    "minItems": _least,
    "minProperties": _least,
    "maxLength": _most,
    "maxItems": _most,
    "maxProperties": _most,
}
