"""The schema of a tool in normal form: all conditions on a value joined to one set."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set, Sized
from itertools import chain, islice
from math import inf
from typing import Any

from backend.sampling.grammar.schema import (
    COMBINATIONS,
    IMPLIED_TYPES,
    AnySchema,
    Schema,
    token,
    type_of,
)
from backend.sampling.grammar.schema_repair import JSON_TYPES, Notes, Repair, has_type

Conditions = Mapping[str, Any]
"""Keywords of a repaired schema, without `$ref`, `anyOf` and `allOf` of other than conditions."""

_LEAST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_MOST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_SINGLE = ("pattern", "format", "multipleOf")
_OBJECTS = ("properties", "patternProperties", "additionalProperties")
_ITEMS = ("prefixItems", "items")


def _merge(first: Conditions, second: Conditions) -> dict[str, Any] | None:
    """Return conditions that mean both, or `None` if no value matches both.

    Conditions that cannot be joined stay in `allOf`.
    """
    if not first or not second:
        return dict(first or second)
    joined: dict[str, Any] = {**first, **second}
    for keyword, join in _JOINS.items():
        if keyword in first and keyword in second:
            joined[keyword] = join(first[keyword], second[keyword])
    if joined.get("type") == [] or joined.get("enum") == []:
        return None
    beside = [*first.get("allOf", ()), *second.get("allOf", ())]
    for keyword in _SINGLE:
        if keyword in first and joined.get(keyword) != first[keyword]:
            joined[keyword] = first[keyword]
            beside.append({keyword: second[keyword]})
    if any(keyword in first for keyword in _ITEMS):
        beside += _join_items(joined, first, second)
    _join_objects(joined, first, second)
    return joined | ({"allOf": beside} if beside else {})


def _both(first: AnySchema, second: AnySchema) -> AnySchema:
    """Return a schema that means both, not yet joined."""
    if isinstance(first, bool):
        return second if first else False
    if isinstance(second, bool):
        return first if second else False
    return first if first == second else {"allOf": [first, second]}


def _types(first: list[str], second: list[str]) -> list[str]:
    found = {*first} & {*second}
    for one, other in ((first, second), (second, first)):
        if "integer" in one and "number" in other:
            found.add("integer")
    return sorted(found)


def _values(first: list[Any], second: list[Any]) -> list[Any]:
    known = [*map(repr, second)]
    return [value for value in first if repr(value) in known]


def _names(first: list[str], second: list[str]) -> list[str]:
    return list(dict.fromkeys((*first, *second)))


_JOINS: Mapping[str, Callable[[Any, Any], Any]] = {
    "type": _types,
    "enum": _values,
    "required": _names,
    **dict.fromkeys(_LEAST, min),
    **dict.fromkeys(_MOST, max),
}


def _join_items(joined: dict[str, Any], first: Conditions, second: Conditions) -> list[Conditions]:
    others = {keyword: second[keyword] for keyword in _ITEMS if keyword in second}
    for keyword in _ITEMS:
        joined.pop(keyword, None)
    joined |= {keyword: first[keyword] for keyword in _ITEMS if keyword in first}
    if not others:
        return []
    if "prefixItems" in joined or "prefixItems" in others:
        return [others]
    joined["items"] = _both(first["items"], second["items"])
    return []


def _join_objects(joined: dict[str, Any], first: Conditions, second: Conditions) -> None:
    if not any(keyword in first for keyword in _OBJECTS):
        return
    required = joined.get("required", ())
    properties: dict[str, AnySchema] = {}
    for one, other in ((first, second), (second, first)):
        for name, part in one.get("properties", {}).items():
            others = _elsewhere(name, other)
            if others is False and (name not in required or _is_refused(name, other)):
                properties.setdefault(name, False)
            else:
                # A name that is required although others are excluded is a mistake: it may be
                # written.
                properties.setdefault(name, part if others is False else _both(part, others))
    patterns: dict[str, AnySchema] = dict(first.get("patternProperties", {}))
    for pattern, part in second.get("patternProperties", {}).items():
        patterns[pattern] = _both(patterns.get(pattern, True), part)
    additional = _both(
        first.get("additionalProperties", True), second.get("additionalProperties", True)
    )
    if additional is False:
        properties = {
            name: part for name, part in properties.items() if part is not False or name in required
        }
    found = {"properties": properties, "patternProperties": patterns}
    joined |= {keyword: value for keyword, value in found.items() if keyword in joined}
    if "additionalProperties" in joined:
        joined["additionalProperties"] = additional


def _is_refused(name: str, conditions: Conditions) -> bool:
    """Return whether conditions exclude a property by its name."""
    return conditions.get("properties", {}).get(name) is False


def _elsewhere(name: str, other: Conditions) -> AnySchema:
    """Return the schema that conditions have for a property."""
    others = True if "patternProperties" in other else other.get("additionalProperties", True)
    found: AnySchema = other.get("properties", {}).get(name, others)
    return found


_MAX_WAYS = 32
_MAX_DEPTH = 40
_MAX_SCHEMAS = 5000
# They cost their number squared.
_MAX_OPTIONAL = 500
_RANGES = (
    *(("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")),
    *(("minimum", "exclusiveMaximum"), ("exclusiveMinimum", "maximum")),
    *(("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")),
)
_DEFINITIONS = "#/$defs/"


class Normal:
    """A schema in normal form.

    Attributes:
        root: The schema, without definitions; `False` if no value is allowed.
    """

    def __init__(self, repair: Repair, *, is_object: bool = False) -> None:
        """Normalise a repaired schema, of which only the objects are meant if it says so."""
        self.notes: Notes = dict(repair.notes)
        self.definitions: dict[str, AnySchema] = {}
        self._sources = repair.definitions
        self._waiting: deque[str] = deque()
        self._count = 0
        root = {"allOf": [repair.root, {"type": ["object"]}]} if is_object else repair.root
        self.root = self._value(root, "#", 0)
        while self._waiting:
            name = self._waiting.popleft()
            place = f"{_DEFINITIONS}{name}"
            self.definitions[name] = self._value(self._sources[name], place, 0)
        for name in self.definitions:
            self._unroll(name)
        while endless := self._endless():
            self._drop(f"{_DEFINITIONS}{endless}", "has no end")
            self.definitions[endless] = True

    def _drop(self, pointer: str, reason: str) -> None:
        self.notes.setdefault(pointer, reason)

    def _value(self, schema: AnySchema, pointer: str, depth: int) -> AnySchema:
        if isinstance(schema, bool):
            return schema
        self._count += 1
        if depth > _MAX_DEPTH or self._count > _MAX_SCHEMAS:
            self._drop(pointer, "is part of too large a schema")
            return True
        if schema.keys() == {"$ref"}:
            return self._reference(schema["$ref"])
        if schema.keys() == {"anyOf"}:
            parts = enumerate(schema["anyOf"])
            return _any_of(self._value(p, f"{pointer}/anyOf/{i}", depth + 1) for i, p in parts)
        ways = list(islice(self._ways(schema, pointer, ()), _MAX_WAYS))
        return _any_of(self._conditions(way, pointer, depth) for way in ways)

    def _reference(self, name: str) -> Schema:
        if name not in self.definitions:
            self.definitions[name] = True
            self._waiting.append(name)
        return {"$ref": f"{_DEFINITIONS}{name}"}

    def _unroll(self, name: str) -> None:
        """Remove the ways in which a definition is nothing but itself."""
        known, ways, waiting = {name}, [], [self.definitions[name]]
        is_loop = False
        while waiting:
            part = waiting.pop(0)
            fields = part if isinstance(part, Mapping) else {}
            target = fields.get("$ref", "").removeprefix(_DEFINITIONS)
            if target and target not in known:
                known.add(target)
                waiting.insert(0, self.definitions[target])
            is_loop |= target == name
            waiting[:0] = fields.get("anyOf", ())
            ways += [] if target or "anyOf" in fields else [part]
        if is_loop:
            self.definitions[name] = self._any_way(ways, f"{_DEFINITIONS}{name}")

    def _endless(self) -> str:
        """Return a definition whose values must hold such a value again; empty for none."""
        ended: set[str] = set()
        waiting = [*self.definitions]
        while True:
            left = [name for name in waiting if not _can_end(self.definitions[name], ended)]
            if len(left) == len(waiting):
                return next(iter(left), "")
            ended |= {*waiting} - {*left}
            waiting = left

    def _any_way(self, ways: list[AnySchema], pointer: str) -> AnySchema:
        if not ways:
            self._drop(pointer, "leads to itself")
        return _any_of(ways) if ways else True

    def _ways(
        self, schema: AnySchema, pointer: str, around: tuple[str, ...]
    ) -> Iterator[dict[str, Any]]:
        """Yield sets of conditions, each a way to match a schema in definitions `around` it."""
        if isinstance(schema, bool):
            yield from [{}] if schema else []
            return
        ways = [{key: value for key, value in schema.items() if key not in COMBINATIONS}]
        for keyword, others in self._joined(schema, pointer, around):
            known = list(islice(others, _MAX_WAYS + 1))
            if len(known) * len(ways) > _MAX_WAYS:
                self._drop(f"{pointer}/{keyword}", "has too many combinations")
                continue
            merged = (_merge(way, other) for way in ways for other in known)
            ways = [way for way in merged if way is not None]
        yield from ways

    def _joined(
        self, schema: Schema, pointer: str, around: tuple[str, ...]
    ) -> Iterator[tuple[str, Iterable[dict[str, Any]]]]:
        """Yield the ways of each schema that must match together with the others."""
        name = schema.get("$ref", "")
        if name and name not in around and len(around) < _MAX_DEPTH:
            place = f"{_DEFINITIONS}{name}"
            yield "$ref", self._ways(self._sources[name], place, (*around, name))
        for index, part in enumerate(schema.get("allOf", ())):
            yield "allOf", self._ways(part, f"{pointer}/allOf/{index}", around)
        if parts := schema.get("anyOf"):
            known = [{"$ref": name} for name in around]
            ways = (self._ways(part, pointer, around) for part in parts if part not in known)
            yield "anyOf", chain.from_iterable(ways)

    def _conditions(self, way: Mapping[str, Any], pointer: str, depth: int) -> AnySchema:
        if "enum" in way:
            return self._enumeration(way, pointer)
        fields = _of_its_types(way)
        self._drop_empty_ranges(fields, pointer)
        self._normalise_items(fields, pointer, depth)
        if "object" in fields.get("type", ()) and not self._normalise_object(
            fields, pointer, depth
        ):
            return False
        if "allOf" in fields:
            found = [self._conditions(part, pointer, depth) for part in fields["allOf"]]
            fields["allOf"] = [part for part in found if not isinstance(part, bool)]
        if len(fields.get("type", ())) == 1:
            [fields["type"]] = fields["type"]
        return fields or True

    def _enumeration(self, way: Mapping[str, Any], pointer: str) -> AnySchema:
        """Return the values of an enumeration that have a type and size of a way."""
        types = way.get("type", JSON_TYPES)
        typed = [value for value in way["enum"] if has_type(value, types)]
        values = [value for value in typed if _is_within(value, way)]
        if typed and not values:
            self._drop(f"{pointer}/enum", "has no value within the limits beside it")
        for keyword in sorted(_NOT_TRIED & way.keys()):
            self._drop(f"{pointer}/{keyword}", "is not held beside an enumeration")
        return {"enum": values or typed} if typed else False

    def _drop_empty_ranges(self, fields: dict[str, Any], pointer: str) -> None:
        for low, high in _RANGES:
            if low in fields and high in fields and fields[low] > fields[high]:
                self._drop(f"{pointer}/{low}", f"is larger than {high}")
                del fields[low], fields[high]

    def _normalise_items(self, fields: dict[str, Any], pointer: str, depth: int) -> None:
        if "prefixItems" in fields:
            fields["prefixItems"] = [
                self._value(part, f"{pointer}/prefixItems/{index}", depth + 1)
                for index, part in enumerate(fields["prefixItems"])
            ]
        if "items" in fields:
            fields["items"] = self._value(fields["items"], f"{pointer}/items", depth + 1)
            if fields["items"] is False and not fields.get("prefixItems"):
                del fields["items"]
                fields["maxItems"] = 0

    def _normalise_object(self, fields: dict[str, Any], pointer: str, depth: int) -> bool:
        """Normalise the parts of an object in place; return whether there can be one."""
        for keyword in ("properties", "patternProperties"):
            if keyword in fields:
                here = f"{pointer}/{keyword}"
                fields[keyword] = {
                    name: self._value(part, f"{here}/{token(name)}", depth + 1)
                    for name, part in fields[keyword].items()
                }
        if others := fields.get("additionalProperties"):
            place = f"{pointer}/additionalProperties"
            fields["additionalProperties"] = self._value(others, place, depth + 1)
        self._declare_required(fields, pointer)
        self._limit_properties(fields, pointer)
        declared = fields.get("properties", {})
        return all(declared.get(name, True) is not False for name in fields.get("required", ()))

    def _declare_required(self, fields: dict[str, Any], pointer: str) -> None:
        """Declare the properties that are required only: closing the object must allow them."""
        if "patternProperties" in fields:
            return
        others = fields.get("additionalProperties", True)
        for name in fields.get("required", ()):
            if name not in fields.setdefault("properties", {}):
                if others is False:
                    self._drop(f"{pointer}/required", "names a property that is not allowed")
                fields["properties"][name] = others if others is not False else True

    def _limit_properties(self, fields: dict[str, Any], pointer: str) -> None:
        """Drop limits on the number of properties that cannot be kept, and too many of them."""
        declared, required = fields.get("properties", {}), fields.get("required", ())
        if len(declared.keys() - {*required}) > _MAX_OPTIONAL:
            self._drop(f"{pointer}/properties", "has too many optional properties")
            for keyword in ("properties", "required", "additionalProperties"):
                fields.pop(keyword, None)
        elif declared:
            if fields.pop("minProperties", 0) > len(required):
                self._drop(f"{pointer}/minProperties", "cannot be kept with optional properties")
            # An object that only declares its properties has no others.
            others = fields.get("additionalProperties", "patternProperties" in fields)
            most = len(declared) if others is False else inf
            if fields.pop("maxProperties", inf) < most:
                self._drop(f"{pointer}/maxProperties", "cannot be kept with optional properties")


_SIZES = {"string": "Length", "array": "Items", "object": "Properties"}
# Patterns of a caller's are not run here, where nothing ends one that takes long.
_NOT_TRIED = frozenset({"pattern", "format", "multipleOf", "allOf"})


def _is_within(value: object, way: Mapping[str, Any]) -> bool:
    """Return whether a value has a size that a set of conditions allows."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        is_above = way.get("exclusiveMinimum", -inf) < value >= way.get("minimum", value)
        is_below = way.get("exclusiveMaximum", inf) > value <= way.get("maximum", value)
        return bool(is_above and is_below)
    size = _SIZES.get(type_of(value))
    if size is None or not isinstance(value, Sized):
        return True
    length = len(value)
    return bool(way.get(f"min{size}", 0) <= length <= way.get(f"max{size}", length))


def _can_end(schema: AnySchema, ended: Set[str]) -> bool:
    """Return whether a schema allows a value, if of the definitions just these do."""
    if isinstance(schema, bool) or "enum" in schema:
        return True
    if "$ref" in schema:
        return schema["$ref"].removeprefix(_DEFINITIONS) in ended
    if "anyOf" in schema:
        return any(_can_end(way, ended) for way in schema["anyOf"])
    if schema.get("type") == "array" and schema.get("minItems"):
        first = [*schema.get("prefixItems", ()), schema.get("items", True)]
        return all(_can_end(part, ended) for part in first[: schema["minItems"]])
    is_object = schema.get("type") == "object"
    required = schema.get("required", ()) if is_object else ()
    return all(_can_end(schema.get("properties", {}).get(n, True), ended) for n in required)


def _any_of(parts: Iterable[AnySchema]) -> AnySchema:
    found: dict[str, AnySchema] = {}
    for part in parts:
        if part is True:
            return True
        inner = part["anyOf"] if isinstance(part, Mapping) and "anyOf" in part else [part]
        found |= {repr(each): each for each in inner if each is not False}
    ways = list(found.values())
    if not ways:
        return False
    return ways[0] if len(ways) == 1 else {"anyOf": ways}


def _of_its_types(way: Mapping[str, Any]) -> dict[str, Any]:
    """Return the conditions that apply to the types of a schema, which they may imply."""
    types = way.get("type") or [
        name for name, keywords in IMPLIED_TYPES.items() if keywords & way.keys()
    ]
    if not types:
        return {key: value for key, value in way.items() if key != "type"}
    meant = frozenset[str]().union(
        *(IMPLIED_TYPES.get("number" if name == "integer" else name, ()) for name in types)
    )
    own = {key: value for key, value in way.items() if key in meant or key == "allOf"}
    return {"type": list(types), **own}
