"""Keywords of schemas that mean the same as others: of other drafts, of OpenAPI and of generators.

Each function changes the keywords of one schema, and not those of its parts.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import permutations
from typing import Any

from backend.sampling.grammar.number_bounds import with_exact_bounds
from backend.sampling.grammar.schema_choices import TEXTS, Find, with_any_of, with_open_choice
from backend.sampling.grammar.schema_conditions import with_open_conditions
from backend.sampling.grammar.string_formats import FORMATS

_KNOWN_DRAFTS = re.compile(r"https?://json-schema\.org/draft(-0[3467]|/2019-09|/2020-12)/schema#?")
# An array of four values has 65 ways to order some of them.
_MAX_UNIQUE = 4
_OF_ARRAYS = frozenset({"type", "items", "minItems", "maxItems"})
_LENGTHS = tuple(f"{end}{of}" for end in ("min", "max") for of in ("Length", "Items", "Properties"))
# Each optional property is a way of its own to write the object, with a copy of all their schemas.
_MAX_COPIES = 512
# Each doubles the ways to write the object.
_MAX_DEPENDENCIES = 4
_COUNTS = frozenset({"minProperties", "maxProperties"})
_NAME_LENGTHS = frozenset({"minLength", "maxLength"})
_MAX_REFERENCES = 8
_OF_WHOLES = frozenset({"$defs", "definitions", "$schema", "$id", "id"})
_COMBINING = ("$ref", "anyOf", "oneOf", "allOf", "const")


def _allows_all(value: object) -> bool:
    return value is True or (isinstance(value, Mapping) and value.keys() <= TEXTS)


def _allows_names(value: object) -> bool:
    """Return whether a schema allows any name, which is always a string."""
    fields = value if isinstance(value, Mapping) else {}
    is_text = "string" in _types_of(fields)
    return value is True or (is_text and bool(fields) and fields.keys() <= TEXTS | {"type"})


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
    # Others say how a text is meant, or how a number is stored.
    "format": lambda value: isinstance(value, str) and value not in FORMATS,
}

_SECONDS = r"\d+([.,]\d+)?S"
_TIME = rf"T(\d+H(\d+M)?({_SECONDS})?|\d+M({_SECONDS})?|{_SECONDS})"
_DAYS = r"(\d+Y(\d+M)?(\d+D)?|\d+M(\d+D)?|\d+D)"
_DOMAIN = r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
# Patterns of zod's and pydantic's that look ahead, and the same without it.
_PLAIN_PATTERNS: Mapping[object, str] = {
    rf"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]{_DOMAIN}": (
        rf"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]{_DOMAIN}"
    ),
    (
        r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
        r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
    ): rf"^P(\d+W|{_DAYS}({_TIME})?|{_TIME})$",
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+\-]?(\d+\.?\d*|\.\d+)$",
}


def in_usual_keywords(schema: Mapping[str, Any], find: Find) -> dict[str, Any]:
    """Return the same conditions in the keywords that JSON Schema itself has for them.

    A value may match two schemas of `oneOf` that do not exclude each other: no grammar can.
    """
    fields = with_any_of(in_known_conditions(_with_unique_items(dict(schema), find), find))
    kept = {key: value for key, value in fields.items() if not is_idle(key, value)}
    return _with_null(_with_usual_numbers(kept))


def is_never(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema allows no value, as zod's `never` says it."""
    refused = schema.get("not", False)
    return refused is True or _is_empty(refused)


def is_idle(keyword: str, value: object) -> bool:
    """Return whether a keyword of another draft or language restricts nothing."""
    return keyword in _IDLE and _IDLE[keyword](value)


def in_known_conditions(schema: Mapping[str, Any], find: Find) -> dict[str, Any]:
    """Return a schema that restricts its properties by conditions that a grammar knows."""
    fields = _without_others(_with_known_text(schema))
    fields = _with_closed_parts(_with_declared_names(fields, find), find)
    fields = _with_dependencies(fields)
    fields = with_open_conditions(fields, find)
    return _with_counted_properties(with_open_choice(_with_required_tag(fields), find))


def _with_known_text(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without a format of zod's own, whose pattern says the same."""
    fields, pattern, known = dict(schema), schema.get("pattern"), schema.get("format")
    if isinstance(pattern, str):
        fields["pattern"] = _PLAIN_PATTERNS.get(pattern, pattern)
        if isinstance(known, str) and known not in FORMATS:
            del fields["format"]
    return fields


def _with_unique_items(fields: dict[str, Any], find: Find) -> dict[str, Any]:
    """Return a schema of an array that lists the ways to have each of a few values once.

    Of more values it limits their number, and elsewhere nothing.
    """
    if fields.get("uniqueItems") is not True or isinstance(fields.get("items"), list):
        return fields
    others = {key: value for key, value in fields.items() if key != "uniqueItems"}
    values = _values_of(_followed(fields.get("items"), find))
    least, most = others.get("minItems", 0), others.get("maxItems", len(values))
    if not (values and _is_count(least) and _is_count(most)) or "prefixItems" in fields:
        return others
    most = min(int(most), len(values))
    sizes = range(int(least), most + 1)
    if len(values) > _MAX_UNIQUE or not sizes or any(key in others for key in _COMBINING):
        return {**others, "maxItems": most}
    around = {key: value for key, value in others.items() if key not in _OF_ARRAYS}
    return {
        **around,
        "anyOf": [_exactly(way) for size in sizes for way in permutations(values, size)],
    }


def _is_count(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf and value == int(value)  # type: ignore[operator, call-overload]


def _values_of(schema: Mapping[str, Any]) -> list[Any]:
    """Return the different values of an `enum` or a `const`; without either, none."""
    values = [schema["const"]] if "const" in schema else _listed(schema.get("enum"))
    return list({repr(value): value for value in values}.values())


def _exactly(values: Sequence[Any]) -> dict[str, Any]:
    """Return the schema of the array of these values."""
    items = [{"const": value} for value in values]
    size = len(items)
    known = {"prefixItems": items} if items else {}
    return {"type": "array", **known, "items": False, "minItems": size, "maxItems": size}


def _with_declared_names(fields: dict[str, Any], find: Find) -> dict[str, Any]:
    """Return a schema that declares the names of its properties rather than restricting them."""
    names = _followed(fields.get("propertyNames"), find)
    if {"properties", "patternProperties"} & fields.keys() or not _types_of(names):
        return fields
    part, known, pattern = fields.get("additionalProperties", True), _listing(names), ""
    if known is None and not (pattern := _pattern_of(names)):
        return fields
    declared = {"patternProperties": {pattern: part}} if pattern else {}
    if known is not None:
        declared = {"properties": dict.fromkeys(known, part)}
    others = {key: value for key, value in fields.items() if key != "propertyNames"}
    return {**others, **declared, "additionalProperties": False}


def _followed(schema: object, find: Find) -> Mapping[str, Any]:
    """Return the schema at the end of references."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping) or schema.keys() - TEXTS != {"$ref"}:
            break
        schema = find(schema["$ref"])
    return schema if isinstance(schema, Mapping) else {}


def _types_of(names: Mapping[str, Any]) -> frozenset[str]:
    """Return the types of names, which are texts or numbers that a key spells; else none."""
    types = names.get("type", "string")
    listed = [types] if isinstance(types, str) else _listed(types)
    are_known = all(
        one == "string" or (isinstance(one, str) and one in _NUMERALS) for one in listed
    )
    return frozenset(listed) if are_known else frozenset()


def _listing(names: object) -> list[str] | None:
    """Return the names that a schema lists, if that is all that it does."""
    if not isinstance(names, Mapping) or not _types_of(names):
        return None
    match sorted(names.keys() - TEXTS - {"type"}):
        case ["const"]:
            values = [names["const"]]
        case ["enum"]:
            values = _listed(names["enum"])
        case ["anyOf" | "oneOf" as choice]:
            lists = [_listing(part) for part in _listed(names[choice])]
            if not lists or None in lists:
                return None
            values = [name for known in lists for name in known or ()]
        case _:
            return None
    return [str(value) for value in values if type(value) in (str, int)]


_NUMERALS = {"integer": r"^-?[0-9]+$", "number": r"^-?[0-9]+(\.[0-9]+)?$"}


def _pattern_of(names: Mapping[str, Any]) -> str:
    """Return a schema of names as a pattern; empty if there is none."""
    left = names.keys() - TEXTS - {"type"}
    types = _types_of(names)
    if not left and types and "string" not in types:
        return _NUMERALS["number" if "number" in types else "integer"]
    known, pattern = names.get("format"), _with_known_text(names).get("pattern")
    if isinstance(pattern, str) and left <= {"pattern", "format"}:
        # Generators write both for the same condition.
        return pattern
    if left == {"format"} and isinstance(known, str) and known in FORMATS:
        return f"^({FORMATS[known]})$"
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    are_lengths = all(type(names[key]) is int and 0 <= names[key] <= _MAX_COPIES for key in left)
    if left and left <= _NAME_LENGTHS and are_lengths and (most == "" or least <= most):
        return f"^(?s:.){{{least},{most}}}$"
    return ""


# Patterns that any name matches, or any but an empty one.
_ANY_NAME = frozenset(
    f"{begin}{some}{end}" for begin in ("^", "") for end in ("$", "") for some in (".*", ".+")
)


def _without_others(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without the properties that are left over by a pattern of all names."""
    patterns = fields.get("patternProperties")
    has_all = isinstance(patterns, Mapping) and not _ANY_NAME.isdisjoint(patterns)
    return {**fields, "additionalProperties": False} if has_all else fields


# A property that another of them names counts only if that matches.
_CONDITIONAL = frozenset({"anyOf", "oneOf", "if", "dependentSchemas", "patternProperties"})


def _with_closed_parts(fields: dict[str, Any], find: Find) -> dict[str, Any]:
    """Return a schema that closes together the objects of which it consists."""
    if fields.get("unevaluatedProperties") is not False:
        return fields
    parts, waiting = list[Mapping[str, Any]](), list[object]([fields])
    while waiting and len(parts) < _MAX_COPIES:
        part = _followed(waiting.pop(), find)
        parts.append(part)
        waiting += [find(part["$ref"])] if "$ref" in part else []
        waiting += _listed(part.get("allOf"))
    known = [part.get("properties", {}) for part in parts]
    is_open = any((_CONDITIONAL | {"additionalProperties"}) & part.keys() for part in parts)
    if waiting or is_open or not all(isinstance(names, Mapping) for names in known):
        return fields
    kept = {key: value for key, value in fields.items() if key != "unevaluatedProperties"}
    names = dict.fromkeys((name for each in known for name in each), True)
    own = {**names, **kept.get("properties", {})}
    return {**kept, "properties": own, "additionalProperties": False}


def _with_dependencies(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that says with choices which properties a property requires."""
    for keyword in ("dependentRequired", "dependencies"):
        needs = fields.get(keyword)
        if not isinstance(needs, Mapping) or not all(map(_are_names, needs.values())):
            continue
        required = fields.get("required", [])
        if needs and fields.get("type") == "object" and _are_names(required):
            known = _with_needed(required, needs)
            left = {name: others for name, others in needs.items() if name not in known}
            if len(left) <= _MAX_DEPENDENCIES:
                ways = [{"anyOf": _ways_to_need(name, others)} for name, others in left.items()]
                kept = {key: value for key, value in fields.items() if key != keyword}
                beside = {"allOf": [*_listed(fields.get("allOf")), *ways]} if ways else {}
                fields = {**kept, "required": known, **beside}
    return fields


def _with_needed(required: Sequence[str], needs: Mapping[str, Sequence[str]]) -> list[str]:
    """Return required names and all that they require in turn."""
    found = list(dict.fromkeys(required))
    for name in found:
        found += [other for other in dict.fromkeys(needs.get(name, ())) if other not in found]
    return found


def _ways_to_need(name: str, others: Sequence[str]) -> list[dict[str, Any]]:
    absent = {"type": "object", "properties": {name: False}}
    return [absent, {"type": "object", "required": list(dict.fromkeys([name, *others]))}]


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


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
    is_closed = fields.get("additionalProperties") is False and "patternProperties" not in fields
    if is_closed and most >= len(optional):
        most, fields = -1, {key: value for key, value in fields.items() if key != "maxProperties"}
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
    return with_exact_bounds(fields)


def _with_null(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that allows null too if it is OpenAPI's `nullable`."""
    if fields.get("nullable") is not True:
        return fields
    del fields["nullable"]
    names = fields.get("type")
    if not isinstance(names, str | list) or any(keyword in fields for keyword in _COMBINING):
        if not fields.keys() - TEXTS:
            return fields
        # References and readers look for these where they are.
        around = {key: fields.pop(key) for key in _OF_WHOLES & fields.keys()}
        return {**around, "anyOf": [fields, {"type": "null"}]}
    fields["type"] = [*([names] if isinstance(names, str) else names), "null"]
    if isinstance(values := fields.get("enum"), list):
        fields["enum"] = [*values, *([] if None in values else [None])]
    return fields
