"""Joins two sets of conditions to one that means both."""

from collections.abc import Callable, Mapping
from typing import Any

from backend.sampling.grammar.schema.tight import AnySchema

Conditions = Mapping[str, Any]
"""Keywords of a repaired schema, without `$ref`, `anyOf` and `allOf` of other than conditions."""

_LEAST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_MOST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_SINGLE = ("pattern", "format", "multipleOf")
_OBJECTS = ("properties", "patternProperties", "additionalProperties")
_ITEMS = ("prefixItems", "items")


def merge(first: Conditions, second: Conditions) -> dict[str, Any] | None:
    """Return conditions that mean both, or `None` if no value matches both.

    What cannot be joined stays in `allOf`.
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


def both(first: AnySchema, second: AnySchema) -> AnySchema:
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
    """Join the items of arrays in place; return what must stay beside them."""
    others = {keyword: second[keyword] for keyword in _ITEMS if keyword in second}
    for keyword in _ITEMS:
        joined.pop(keyword, None)
    joined |= {keyword: first[keyword] for keyword in _ITEMS if keyword in first}
    if not others:
        return []
    if "prefixItems" in joined or "prefixItems" in others:
        return [others]
    joined["items"] = both(first["items"], second["items"])
    return []


def _join_objects(joined: dict[str, Any], first: Conditions, second: Conditions) -> None:
    """Join the properties of objects in place."""
    if not any(keyword in first for keyword in _OBJECTS):
        return
    required = joined.get("required", ())
    properties: dict[str, AnySchema] = {}
    for one, other in ((first, second), (second, first)):
        for name, part in one.get("properties", {}).items():
            others = _elsewhere(name, other)
            if others is False and name not in required:
                properties.setdefault(name, False)
            else:
                # A name that is required although it is excluded is a mistake: it may be written.
                properties.setdefault(name, part if others is False else both(part, others))
    patterns: dict[str, AnySchema] = dict(first.get("patternProperties", {}))
    for pattern, part in second.get("patternProperties", {}).items():
        patterns[pattern] = both(patterns.get(pattern, True), part)
    additional = both(
        first.get("additionalProperties", True), second.get("additionalProperties", True)
    )
    if additional is False:
        properties = {name: part for name, part in properties.items() if part is not False}
    found = {"properties": properties, "patternProperties": patterns}
    joined |= {keyword: value for keyword, value in found.items() if keyword in joined}
    if "additionalProperties" in joined:
        joined["additionalProperties"] = additional


def _elsewhere(name: str, other: Conditions) -> AnySchema:
    """Return what conditions say about a property."""
    others = True if "patternProperties" in other else other.get("additionalProperties", True)
    found: AnySchema = other.get("properties", {}).get(name, others)
    return found
