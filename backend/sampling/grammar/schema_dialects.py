"""Keywords of schemas that mean the same as others: of other drafts, of OpenAPI and of generators.

Each function changes the keywords of one schema, and not those of its parts.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_TEXTS = frozenset({"title", "description", "$comment"})
_KNOWN_DRAFTS = re.compile(r"https?://json-schema\.org/draft(-0[3467]|/2019-09|/2020-12)/schema#?")
# Beyond it, JavaScript and others that read numbers as doubles do not tell integers apart.
_LARGEST = 2**53
_LENGTHS = tuple(f"{end}{of}" for end in ("min", "max") for of in ("Length", "Items", "Properties"))
# Each optional property is a way of its own to write the object, with a copy of all their schemas.
_MAX_COPIES = 512
_COUNTS = frozenset({"minProperties", "maxProperties"})
_OF_WHOLES = frozenset({"$defs", "definitions", "$schema", "$id", "id"})
_COMBINING = ("$ref", "anyOf", "oneOf", "allOf", "const")


def _allows_all(value: object) -> bool:
    return value is True or (isinstance(value, Mapping) and value.keys() <= _TEXTS)


def _allows_names(value: object) -> bool:
    """Return whether a schema allows any name, which is always a string."""
    fields = value if isinstance(value, Mapping) else {}
    is_text = fields.get("type", "string") == "string"
    return value is True or (is_text and bool(fields) and fields.keys() <= _TEXTS | {"type"})


def _is_empty(value: object) -> bool:
    return value == {}


# Whether a keyword with this value restricts nothing.
_IDLE: Mapping[str, Callable[[object], bool]] = {
    "$schema": lambda value: isinstance(value, str) and not _KNOWN_DRAFTS.fullmatch(value),
    "uniqueItems": lambda value: value is False,
    "nullable": lambda value: value is False,
    "propertyNames": lambda value: _is_empty(value) or _allows_names(value),
    "unevaluatedProperties": _allows_all,
    "unevaluatedItems": _allows_all,
    "dependentRequired": _is_empty,
    "dependentSchemas": _is_empty,
    "dependencies": _is_empty,
    "contentSchema": lambda value: isinstance(value, bool | Mapping),
    "discriminator": lambda value: isinstance(value, Mapping),
}


def in_usual_keywords(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same conditions in the keywords that JSON Schema itself has for them."""
    fields = in_known_conditions(schema)
    kept = {key: value for key, value in fields.items() if not is_idle(key, value)}
    return _with_null(_with_usual_numbers(kept))


def is_idle(keyword: str, value: object) -> bool:
    """Return whether a keyword of another draft or language restricts nothing."""
    return keyword in _IDLE and _IDLE[keyword](value)


def in_known_conditions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that says in conditions of a grammar what it says of its properties."""
    return _with_counted_properties(_with_required_tag(_with_declared_names(schema)))


def _with_declared_names(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that declares the names of its properties rather than restricting them."""
    fields, names = dict(schema), schema.get("propertyNames")
    declares = {"properties", "patternProperties"} & schema.keys()
    if declares or not isinstance(names, Mapping) or names.get("type", "string") != "string":
        return fields
    part, left = schema.get("additionalProperties", True), names.keys() - _TEXTS - {"type"}
    if left == {"enum"} and isinstance(names["enum"], list):
        known = [name for name in names["enum"] if isinstance(name, str)]
        fields["properties"] = dict.fromkeys(known, part)
    elif left == {"pattern"} and isinstance(names["pattern"], str):
        fields["patternProperties"] = {names["pattern"]: part}
    else:
        return fields
    del fields["propertyNames"]
    return {**fields, "additionalProperties": False}


def _with_required_tag(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose choices require the property that OpenAPI's `discriminator` names."""
    fields, name = dict(schema), tag_of(schema)
    for keyword in ("oneOf", "anyOf") if name else ():
        if isinstance(parts := schema.get(keyword), list):
            fields[keyword] = [_requiring(name, part) for part in parts]
    return fields


def _with_counted_properties(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that lists the ways to have one optional property at least, or at most."""
    properties, known = fields.get("properties"), fields.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(known, list):
        return fields
    optional = [
        name for name, part in properties.items() if name not in known and part is not False
    ]
    least, most = (_count(fields, end, len(known)) for end in ("minProperties", "maxProperties"))
    is_possible = not 0 <= most < least and "patternProperties" not in fields
    is_counted = is_possible and (least == 1 or most in (0, 1))
    if not (is_counted and optional and _may_be_copied(properties, len(optional))):
        return fields
    counted = {key: value for key, value in fields.items() if key != "minProperties"}
    ways = [_only(name, optional[:place]) for place, name in enumerate(optional)]
    if most in (0, 1):
        del counted["maxProperties"]
        counted["additionalProperties"] = False
        ways = [_only(name, {*optional} - {name}) for name in optional] if most else []
        ways += [_only("", optional)] if least < 1 else []
    return {**counted, "allOf": [*_listed(fields.get("allOf")), {"anyOf": ways}]}


def _may_be_copied(properties: Mapping[str, Any], times: int) -> bool:
    """Return whether so many copies are few schemas; inside, no properties are counted again."""
    waiting: list[object] = list(properties.values())
    count = 0
    while waiting and count * times <= _MAX_COPIES:
        value = waiting.pop()
        if isinstance(value, Mapping):
            if _COUNTS & value.keys():
                return False
            waiting += value.values()
            count += 1
        waiting += value if isinstance(value, list) else ()
    return count * times <= _MAX_COPIES


def _count(fields: Mapping[str, Any], keyword: str, required: int) -> float:
    """Return how many optional properties a limit means; below 0 if it means none."""
    limit = fields.get(keyword)
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        return -1
    return limit - required


def _only(name: str, excluded: Iterable[str]) -> dict[str, Any]:
    """Return the condition that a property is there, and that others are not."""
    absent = dict.fromkeys(sorted(excluded), False)
    return {"type": "object", "properties": absent, "required": [name] if name else []}


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def tag_of(schema: Mapping[str, Any]) -> str:
    """Return the name of the property that tells the choices of a schema apart; empty for none."""
    value = schema.get("discriminator")
    name = value.get("propertyName") if isinstance(value, Mapping) else None
    return name if isinstance(name, str) else ""


def _requiring(name: str, part: object) -> object:
    if not isinstance(part, Mapping):
        return part
    known = part.get("required", [])
    if not isinstance(known, list) or name in known:
        return part
    return {**part, "required": [*known, name]}


def _with_usual_numbers(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with lengths as integers, and with bounds that a double holds exactly."""
    for keyword in _LENGTHS:
        length = fields.get(keyword)
        if isinstance(length, float) and length.is_integer():
            fields[keyword] = int(length)
    for keyword, sign in (("minimum", -1), ("maximum", 1)):
        bound = fields.get(keyword)
        if isinstance(bound, int | float) and bound * sign > _LARGEST:
            fields[keyword] = sign * _LARGEST
    return fields


def _with_null(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that allows null too if it is OpenAPI's `nullable`."""
    if fields.get("nullable") is not True:
        return fields
    del fields["nullable"]
    names = fields.get("type")
    if not isinstance(names, str | list) or any(keyword in fields for keyword in _COMBINING):
        if not fields.keys() - _TEXTS:
            return fields
        # References and readers look for these where they are.
        around = {key: fields.pop(key) for key in _OF_WHOLES & fields.keys()}
        return {**around, "anyOf": [fields, {"type": "null"}]}
    fields["type"] = [*([names] if isinstance(names, str) else names), "null"]
    if isinstance(values := fields.get("enum"), list):
        fields["enum"] = [*values, *([] if None in values else [None])]
    return fields
