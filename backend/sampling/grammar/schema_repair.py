"""Keywords of JSON schemas that hold, and the values they may have.

Tools come from everywhere: their keywords are misspelled, null, of another draft or of another
language. A keyword that means something is read, and any other dropped.
"""

import math
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from backend.sampling.grammar.number_bounds import (
    LARGEST,
    beyond,
    is_number,
    with_exact_bounds,
)
from backend.sampling.grammar.schema import (
    IMPLIED_TYPES,
    NUMBER_FORMATS,
    AnySchema,
    Schema,
    part_at,
    token,
    type_of,
    words,
)
from backend.sampling.grammar.schema_choices import are_disjoint
from backend.sampling.grammar.schema_dialects import in_known_conditions, is_idle, is_never, tag_of
from backend.sampling.grammar.string_formats import FORMATS

JSON_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
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
_TYPE_NAMES = {name: name for name in JSON_TYPES} | {
    spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings.split()
}
# `List[str]`, `dict<string, int>` and `string[]`.
_GENERIC = re.compile(r"(\w+)\s*[\[<(].+[\])>]")
_LIST_SUFFIX = "[]"

# They restrict values, but no grammar can express it.
_LOST = words(
    "not if then else contains minContains maxContains uniqueItems propertyNames dependentRequired "
    "dependentSchemas dependencies unevaluatedProperties unevaluatedItems divisibleBy extends "
    "disallow"
)
_LONGEST = 10**6
_TOKEN = re.compile(r"\\(?:k<|.)|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:P=|<?[=!])|.", re.DOTALL)
_LOOKS = ("(?=", "(?!", "(?<=", "(?<!")
_REFERENCES = ("(?P=", r"\k<", *(rf"\{digit}" for digit in range(1, 10)))
_WORD_ENDS = (r"\b", r"\B")
_DELIMITED = re.compile(r"/.*[$^].*/[a-z]*|/.+/[gimsuvy]+", re.DOTALL)


class _WrongValueError(ValueError):
    """A keyword has a value that cannot be enforced; the message does not quote it."""


def _type_of_name(name: object) -> str:
    """Return the JSON type that a name means, in any usual spelling.

    Raises:
        _WrongValueError: It means none, and therefore any.
    """
    if isinstance(name, str):
        word = name.strip().lower()
        if word.endswith(_LIST_SUFFIX):
            return "array"
        generic = _GENERIC.fullmatch(word)
        if found := _TYPE_NAMES.get(generic[1] if generic else word):
            return found
    raise _WrongValueError("is no type of JSON: any value is allowed")


def _types(value: object) -> list[str]:
    names = value if isinstance(value, list) else [value]
    if isinstance(value, str) and "|" in value:
        names = value.split("|")
    if not names:
        raise _WrongValueError("is empty")
    found = {_type_of_name("null" if name is None and len(names) > 1 else name) for name in names}
    return sorted(found - {"integer"} if "number" in found else found)


def _number(value: object) -> int | float:
    if not is_number(value) or not math.isfinite(value):
        raise _WrongValueError("is no number")
    return value


def _multiple(value: object) -> int | float | None:
    multiple = _number(value)
    if not 0 < multiple <= LARGEST:
        raise _WrongValueError("is no positive number")
    return multiple


def _least(value: object) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _WrongValueError("is no length")
    if value > _LONGEST:
        raise _WrongValueError("is too large")
    return value or None


def _most(value: object) -> int | None:
    try:
        return 0 if value == 0 and not isinstance(value, bool) else _least(value)
    except _WrongValueError:
        if isinstance(value, int | float) and value > _LONGEST:
            return None
        raise


def _pattern(value: object) -> str | None:
    if not isinstance(value, str):
        raise _WrongValueError("is no text")
    _require_pattern(value)
    return value or None


def _require_pattern(pattern: str) -> None:
    """Refuse a pattern with a construct that no grammar has.

    Raises:
        _WrongValueError: It has one.
    """
    tokens = _TOKEN.findall(pattern)
    if any(token in _LOOKS for token in tokens):
        raise _WrongValueError("looks ahead or behind")
    if any(token in _REFERENCES for token in tokens):
        raise _WrongValueError("refers back")
    if any(token in _WORD_ENDS for token in tokens):
        raise _WrongValueError("has word boundaries")
    if _DELIMITED.fullmatch(pattern):
        raise _WrongValueError("is between slashes, as in a programming language")


def _format(value: object) -> str | None:
    if isinstance(value, str) and value in NUMBER_FORMATS:
        return None
    if not isinstance(value, str) or value not in FORMATS:
        raise _WrongValueError("is not a known format")
    return value


def _enum(value: object) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise _WrongValueError("is no list of values")
    return _distinct(value)


def _required(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _WrongValueError("is no list of names")
    return list(dict.fromkeys(value))


def _distinct(values: Iterable[Any]) -> list[Any]:
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
    "minimum": _number,
    "exclusiveMinimum": _number,
    "maximum": _number,
    "exclusiveMaximum": _number,
    "minLength": _least,
    "minItems": _least,
    "minProperties": _least,
    "maxLength": _most,
    "maxItems": _most,
    "maxProperties": _most,
}


# A tool's schema has hundreds of parts at most; JSON nests some three levels per level of schemas.
_MAX_SCHEMAS = 5000
_MAX_DEPTH = 32
_DEFINITIONS = ("$defs", "definitions")
_CHOICES = ("anyOf", "oneOf", "allOf")
_NAMED = ("properties", "patternProperties")
_ANCHORS = ("$anchor", "$dynamicAnchor")
_DYNAMIC = ("$dynamicRef", "$recursiveRef")
_EXCLUSIVE = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}
_RESTRICTING = frozenset({"type", "enum"}).union(*IMPLIED_TYPES.values())
Notes = dict[str, str]
"""Reasons, by the pointers of dropped keywords and parts; they do not quote values."""


class Repair:
    """A schema without its broken parts, and the definitions that it refers to.

    Attributes:
        root: The schema. Its only keywords are those of `VALUES` with values to rely on, those with
            schemas (`properties`, `patternProperties`, `additionalProperties`, `prefixItems`,
            `items`, `anyOf`, `allOf`), and `$ref` with the name of a definition.
    """

    def __init__(self, root: Schema) -> None:
        self.notes: Notes = {}
        self.definitions: dict[str, AnySchema] = {}
        self._source = root
        self._names: dict[str, str] = {}
        self._waiting: deque[tuple[str, str]] = deque()
        self._count = 0
        self._nested: dict[str, str] | None = None
        self._resources: dict[str, str] | None = None
        self.root = self._schema(root, "#", 0)
        while self._waiting:
            name, pointer = self._waiting.popleft()
            self.definitions[name] = self._schema(self._at(pointer), pointer, 0)

    def _drop(self, pointer: str, reason: str) -> None:
        self.notes.setdefault(pointer, reason)

    def _schema(self, value: object, pointer: str, depth: int) -> AnySchema:
        if isinstance(value, bool):
            return value
        self._count += 1
        if not isinstance(value, Mapping):
            self._drop(pointer, "is no schema")
        elif is_never(value):
            return False
        elif depth > _MAX_DEPTH or self._count > _MAX_SCHEMAS:
            self._drop(pointer, "is part of too large a schema")
        else:
            return self._fields(value, pointer, depth)
        return True

    def _fields(self, written: Schema, pointer: str, depth: int) -> AnySchema:

        def find(reference: object) -> object:
            return self._at(self._place(reference, pointer) or "")

        source = in_known_conditions(written, find)
        for keyword in sorted(_LOST & source.keys()):
            is_alone = keyword in ("then", "else") and "if" not in source
            if not (is_alone or is_idle(keyword, source[keyword])):
                self._drop(f"{pointer}/{keyword}", "cannot be expressed in a grammar")
        fields = self._values(_of_this_draft(source), pointer)
        fields |= self._parts(source, pointer, depth)
        if "allOf" in fields and not fields["allOf"]:
            del fields["allOf"]
        if target := self._target(source, pointer):
            fields["$ref"] = target
        if source.get("nullable") is True:
            return _with_null(fields)
        return fields

    def _values(self, source: Schema, pointer: str) -> dict[str, Any]:
        """Return the keywords whose values are no schemas."""
        fields: dict[str, Any] = {}
        for keyword, check in VALUES.items():
            if keyword in source:
                try:
                    value = check(source[keyword])
                except _WrongValueError as error:
                    self._drop(f"{pointer}/{keyword}", str(error))
                else:
                    fields |= {} if value is None else {keyword: value}
        fields = with_exact_bounds(fields)
        while keyword := beyond(fields):
            self._drop(f"{pointer}/{keyword}", "allows no number that can be written")
            del fields[keyword]
        if "const" in source:
            fields["enum"] = [source["const"]]
        self._choose(fields, pointer, is_nullable=source.get("nullable") is True)
        return fields

    def _choose(self, fields: dict[str, Any], pointer: str, *, is_nullable: bool) -> None:
        """Drop the values of an enumeration that are of another type."""
        if "enum" in fields and "type" in fields:
            types = [*fields["type"], *(["null"] if is_nullable else [])]
            fields["enum"] = [value for value in fields["enum"] if has_type(value, types)]
            if not fields["enum"]:
                del fields["enum"]
                self._drop(f"{pointer}/enum", "has no value of the type")

    def _parts(self, source: Schema, pointer: str, depth: int) -> dict[str, Any]:
        """Return the keywords whose values are schemas."""
        fields: dict[str, Any] = {}
        for keyword in filter(source.__contains__, _NAMED):
            fields |= self._named(keyword, source[keyword], pointer, depth)
        for keyword in filter(source.__contains__, _CHOICES):
            fields |= self._list(keyword, source[keyword], pointer, depth)
        if "oneOf" in fields:
            self._open_choice(fields, pointer, has_tag=bool(tag_of(source)))
        fields |= self._one("additionalProperties", source, pointer, depth)
        return fields | self._items(source, pointer, depth)

    def _one(self, keyword: str, source: Schema, pointer: str, depth: int) -> dict[str, Any]:
        if keyword not in source:
            return {}
        if not isinstance(source[keyword], bool | Mapping):
            self._drop(f"{pointer}/{keyword}", "is no schema")
            return {}
        return {keyword: self._schema(source[keyword], f"{pointer}/{keyword}", depth + 1)}

    def _named(self, keyword: str, value: object, pointer: str, depth: int) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            self._drop(f"{pointer}/{keyword}", "is no object of schemas")
            return {}
        here = f"{pointer}/{keyword}"
        return {
            keyword: {
                name: self._schema(part, f"{here}/{token(name)}", depth + 1)
                for name, part in value.items()
            }
        }

    def _list(self, keyword: str, value: object, pointer: str, depth: int) -> dict[str, Any]:
        if isinstance(value, list):
            here = f"{pointer}/{keyword}"
            known = [part for part in value if isinstance(part, bool | Mapping)]
            if len(known) < len(value):
                self._drop(here, "has an entry that is no schema")
            parts = [self._schema(p, f"{here}/{i}", depth + 1) for i, p in enumerate(known)]
            if parts:
                return {keyword: parts}
        self._drop(f"{pointer}/{keyword}", "is no list of schemas")
        return {}

    def _open_choice(self, fields: dict[str, Any], pointer: str, *, has_tag: bool) -> None:
        """Take `oneOf` for `anyOf`: the same where no value matches twice."""
        parts = fields.pop("oneOf")
        if not (has_tag or are_disjoint(parts, lambda _: None)):
            self._drop(f"{pointer}/oneOf", "may overlap: is taken for anyOf")
        if "anyOf" in fields:
            fields["allOf"] = [*fields.get("allOf", ()), {"anyOf": parts}]
        else:
            fields["anyOf"] = parts

    def _items(self, source: Schema, pointer: str, depth: int) -> dict[str, Any]:
        """Return the items of an array, in today's keywords."""
        first, rest = "prefixItems", "items"
        if isinstance(source.get("items"), list):
            first, rest = "items", "additionalItems"
        fields: dict[str, Any] = {}
        if first in source and source[first] != []:
            value = self._list(first, source[first], pointer, depth)
            fields |= {"prefixItems": value[first]} if value else {}
        found = self._one(rest, source, pointer, depth)
        return fields | ({"items": found[rest]} if found else {})

    def _target(self, source: Schema, pointer: str) -> str:
        """Return the name of the definition that a schema refers to; empty for none."""
        keyword = next((name for name in ("$ref", *_DYNAMIC) if name in source), "")
        if not keyword:
            return ""
        place = self._place(source[keyword], pointer)
        if place is None:
            self._drop(f"{pointer}/{keyword}", "refers to nothing in the schema")
            return ""
        if place not in self._names:
            name = self._free_name(place.rpartition("/")[2])
            self._names[place] = name
            self._waiting.append((name, place))
        return self._names[place]

    def _free_name(self, wanted: str) -> str:
        """Return a name for a definition that needs no escapes in a pointer."""
        name = wanted if wanted.isidentifier() and wanted.isascii() else "part"
        taken = {*self._names.values()}
        numbered = (f"{name}{number}" for number in range(1, len(taken) + 2))
        return name if name not in taken else next(n for n in numbered if n not in taken)

    def _place(self, reference: object, pointer: str) -> str | None:
        """Return the pointer of the schema that a reference at a pointer means, or nothing."""
        if not isinstance(reference, str):
            return None
        uri, _, fragment = reference.partition("#")
        for root in self._roots(uri, pointer):
            place = root + unquote(fragment)
            if isinstance(self._at(place), Mapping | bool):
                return "#" if place == "#/" else place
        return self._elsewhere(unquote(reference))

    def _roots(self, uri: str, pointer: str) -> Iterator[str]:
        """Yield the pointers of the schemas in which a reference at a pointer may point."""
        if self._resources is None:
            self._resources = dict(_resources(self._source))
        around = [
            known for known in self._resources.values() if f"{pointer}/".startswith(f"{known}/")
        ]
        nearest = max(around, key=len, default="#")
        base = next((name for name, place in self._resources.items() if place == nearest), "")
        if found := self._resources.get(_joined(base, uri)):
            yield found
        if not uri:
            yield from (nearest, "#")

    def _elsewhere(self, place: str) -> str | None:
        """Return the pointer of an anchor, or of a definition that was moved with its schema."""
        if self._nested is None:
            self._nested = dict(_marked(self._source))
        parent, _, name = place.rpartition("/")
        if not parent:
            return self._nested.get(name)
        is_definition = parent.rpartition("/")[2] in _DEFINITIONS
        return self._nested.get(f"/{name}") if is_definition else None

    def _at(self, pointer: str) -> object:
        """Return the value at a pointer, or nothing."""
        if pointer.partition("/")[0] != "#":
            return None
        return self._source if pointer == "#/" else part_at(self._source, pointer)


def has_type(value: object, types: Collection[str]) -> bool:
    """Return whether a JSON value has one of these types."""
    name = type_of(value)
    is_whole = isinstance(value, float) and value.is_integer()
    return (
        name in types
        or (name == "integer" and "number" in types)
        or (is_whole and "integer" in types)
    )


def _of_this_draft(source: Schema) -> Schema:
    """Return the same conditions without the booleans of draft 4."""
    fields = dict(source)
    for bound, exclusive in _EXCLUSIVE.items():
        if isinstance(fields.get(exclusive), bool) and fields.pop(exclusive) and bound in fields:
            fields[exclusive] = fields.pop(bound)
    return fields


def _with_null(fields: dict[str, Any]) -> AnySchema:
    """Return a schema that allows null too, as OpenAPI 3.0 means it."""
    if not _RESTRICTING & fields.keys() and not {"anyOf", "allOf", "$ref"} & fields.keys():
        return fields
    return {"anyOf": [fields, {"type": ["null"]}]}


def _marked(source: object) -> Iterator[tuple[str, str]]:
    """Return the anchors (`#name`) and definitions (`/name`) of a schema with their pointers."""
    waiting: deque[tuple[str, object]] = deque([("#", source)])
    found: list[tuple[str, str]] = []
    while waiting and len(found) < _MAX_SCHEMAS:
        pointer, value = waiting.popleft()
        for key, part in _entries(value):
            here = f"{pointer}/{token(key)}"
            waiting.append((here, part))
            if key in _ANCHORS:
                found.append((f"#{part}", pointer))
            elif key in _DEFINITIONS:
                found += [(f"/{name}", f"{here}/{token(name)}") for name, _ in _entries(part)]
    # The first of a name counts: it comes last here.
    return reversed(found)


# Values that are data may look like schemas.
_DATA = words("const enum default example examples")


def _resources(source: object) -> Iterator[tuple[str, str]]:
    """Yield the addresses of a schema and of those inside it that have one, with their pointers."""
    waiting: deque[tuple[str, str, object]] = deque([("#", "", source)])
    count = 0
    while waiting and count < _MAX_SCHEMAS:
        count += 1
        pointer, base, value = waiting.popleft()
        fields = value if isinstance(value, Mapping) else {}
        name = fields.get("$id", fields.get("id"))
        if isinstance(name, str) and not name.startswith("#"):
            base = _joined(base, name)
            yield base, pointer
        inner = ((key, part) for key, part in _entries(value) if key not in _DATA)
        waiting += ((f"{pointer}/{token(key)}", base, part) for key, part in inner)


def _joined(base: str, uri: str) -> str:
    """Return the address that a reference means in a schema with an address."""
    try:
        return urldefrag(urljoin(base, uri)).url
    except ValueError:
        return ""


def _entries(value: object) -> Iterable[tuple[str, object]]:
    if isinstance(value, Mapping):
        return value.items()
    return ((str(i), part) for i, part in enumerate(value if isinstance(value, list) else ()))
