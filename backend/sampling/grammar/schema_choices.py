"""`oneOf` as `anyOf`: where no value matches two of its schemas, or where they can say so."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any, TypeAlias

Find: TypeAlias = Callable[[object], object]
"""Returns the schema that a reference means, or nothing."""

TEXTS = frozenset({"title", "description", "$comment"})
# A proof that needs more comparisons of two schemas fails.
_MAX_STEPS = 5000
_MAX_PARTS = 64
_MAX_DEPTH = 8
_MAX_CONDITIONS = 8


def with_open_choice(schema: Mapping[str, Any], find: Find) -> dict[str, Any]:
    """Return a schema with `anyOf` in place of `oneOf`, if no value then matches two schemas.

    Objects that match two of them, as each allows the other's properties, are not allowed then.
    """
    parts = schema.get("oneOf")
    if not isinstance(parts, list) or not parts:
        return dict(schema)
    if not are_disjoint(parts, find) and not (parts := _apart(parts, find)):
        return dict(schema)
    return with_any_of({**schema, "oneOf": parts})


def with_any_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with `anyOf` in place of `oneOf`."""
    fields = dict(schema)
    if (parts := fields.pop("oneOf", None)) is None:
        return fields
    if "anyOf" not in fields:
        return {**fields, "anyOf": parts}
    beside = fields.get("allOf", [])
    return {**fields, "allOf": [*(beside if isinstance(beside, list) else []), {"anyOf": parts}]}


def are_disjoint(parts: Sequence[object], find: Find) -> bool:
    """Return whether no value can match two schemas, as far as it shows."""
    fields = [part if isinstance(part, Mapping) else {} for part in parts]
    if _differ([*map(_values, fields)]) or _differ([*map(_types, fields)]):
        return True
    proof, pairs = _Proof(find), combinations(parts, 2)
    return len(parts) <= _MAX_PARTS and all(proof.excludes(one, other) for one, other in pairs)


def _differ(groups: Sequence[frozenset[Any]]) -> bool:
    return all(groups) and len(frozenset[Any]().union(*groups)) == sum(map(len, groups))


def _apart(parts: Sequence[object], find: Find) -> list[Any]:
    """Return schemas of objects without a property that another requires; nothing if one has none.

    Of values that are no objects, each matches all parts without a type: `oneOf` allows none.
    """
    proof, found = _Proof(find), list(parts) if len(parts) <= _MAX_PARTS else []
    for first, second in combinations(range(len(found)), 2):
        if proof.excludes(parts[first], parts[second]):
            continue
        for place, other in ((first, second), (second, first)):
            name = proof.own_name(parts[other], parts[place])
            part = found[place]
            known = part.get("properties", {}) if isinstance(part, Mapping) else None
            if not (name and isinstance(part, Mapping) and isinstance(known, Mapping)):
                return []
            found[place] = {"type": "object", **part, "properties": {**known, name: False}}
    return found


class _Proof:
    """Looks for contradictions between two schemas, for a limited time."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._left = _MAX_STEPS

    def excludes(self, one: object, other: object, depth: int = 0) -> bool:
        """Return whether no value matches both schemas, as far as some of their conditions show."""
        if one is False or other is False:
            return True
        pairs = product(self._conditions(one), self._conditions(other))
        return any(self._contradict(first, second, depth) for first, second in pairs)

    def own_name(self, one: object, other: object) -> str:
        """Return a property that one schema of objects requires and the other does not know."""
        known = self._conditions(other)
        objects = frozenset({"object"})
        parts = [*self._conditions(one), *known]
        if any(_types(part) not in (frozenset(), objects) for part in parts):
            return ""
        names = [name for part in known for name in _names(part)]
        required = (part.get("required") for part in self._conditions(one))
        own = (name for each in required if isinstance(each, list) for name in each)
        return next((name for name in own if isinstance(name, str) and name not in names), "")

    def _conditions(self, schema: object) -> list[Mapping[str, Any]]:
        """Return schemas that a value must all match: this one, and those to which it leads."""
        found: list[Mapping[str, Any]] = []
        waiting = [schema]
        while waiting and len(found) < _MAX_CONDITIONS:
            part = waiting.pop(0)
            if isinstance(part, Mapping):
                found.append(part)
                waiting += [self._find(part["$ref"])] if "$ref" in part else []
                waiting += beside if isinstance(beside := part.get("allOf"), list) else []
        return found

    def _contradict(self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
        self._left -= 1
        values, others = _values(one), _values(other)
        if values and others and not values & others:
            return True
        types, other_types = _types(one), _types(other)
        if types and other_types and not types & other_types:
            return True
        is_over = self._left < 0 or depth > _MAX_DEPTH
        if is_over or not types == other_types == {"object"}:
            return False
        return self._lacks(one, other, depth) or self._lacks(other, one, depth)

    def _lacks(self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
        """Return whether one requires a property that the other does not allow as it is."""
        known, others = one.get("properties", {}), other.get("properties", {})
        required = one.get("required")
        are_sound = isinstance(known, Mapping) and isinstance(others, Mapping)
        if not (are_sound and isinstance(required, list)):
            return False
        is_closed = other.get("additionalProperties") is False and "patternProperties" not in other
        return any(
            self.excludes(known.get(name, True), others[name], depth + 1)
            if name in others
            else is_closed
            for name in required
            if isinstance(name, str)
        )


def _names(schema: Mapping[str, Any]) -> list[Any]:
    """Return the names of the properties of which a schema says something."""
    known, required = schema.get("properties"), schema.get("required")
    names = list(known) if isinstance(known, Mapping) else []
    return names + (required if isinstance(required, list) else [])


def _values(schema: Mapping[str, Any]) -> frozenset[tuple[bool, Any]]:
    """Return the different values of a schema that lists its scalars; of others, nothing."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum", [])
    if not isinstance(listed, list) or any(isinstance(value, dict | list) for value in listed):
        return frozenset()
    # In Python, but not in JSON, true is 1.
    return frozenset((isinstance(value, bool), value) for value in listed)


_TYPES: Mapping[type, str] = {
    str: "string",
    int: "number",
    float: "number",
    bool: "boolean",
    type(None): "null",
}


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types of a schema, `number` for `integer`; nothing if any."""
    if values := _values(schema):
        return frozenset(_TYPES[type(value)] for _, value in values)
    listed = schema.get("type", [])
    names = [listed] if isinstance(listed, str) else listed
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return frozenset()
    return frozenset("number" if name == "integer" else name for name in names)
