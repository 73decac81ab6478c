"""`if`, `not` and `dependentSchemas` as `anyOf`: which values do not match a schema."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise, product
from math import inf, isfinite
from typing import Any, TypeAlias

from backend.sampling.grammar.number_bounds import is_number
from backend.sampling.grammar.schema_choices import TEXTS, Find

AnySchema: TypeAlias = Mapping[str, Any] | bool
Condition: TypeAlias = tuple[AnySchema, AnySchema, AnySchema]
"""A schema, one for the values that match it, and one for all others."""
Ways: TypeAlias = list[dict[str, Any]]
"""Schemas of which a value matches at least one."""
Parts: TypeAlias = list[Any]
"""Schemas that a value must all match."""

_MAX_WAYS = 32
_MAX_DEPTH = 8
_MAX_PARTS, _MAX_SCHEMAS = 64, 2048
_KEYWORDS = frozenset({"if", "not", "dependentSchemas", "dependencies"})
_MAX_TEXTS, _MAX_CHARS = 32, 512
_MAX_LISTED = 256  # of the values of a property
_TYPES = ("string", "number", "boolean", "null", "array", "object")
# The type and the keyword of values beyond a limit, and how far from it they begin.
_BEYOND: Mapping[str, tuple[str, str, int]] = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    **{
        f"{end}{size}": (name, f"{other}{size}", step)
        for name, size in (("string", "Length"), ("array", "Items"), ("object", "Properties"))
        for end, other, step in (("min", "max", -1), ("max", "min", 1))
    },
}


class _UnknownError(Exception):
    """No schema says which values do not match another one."""


def with_open_conditions(
    schema: Mapping[str, Any], find: Find, around: Sequence[Any] = ()
) -> dict[str, Any]:
    """Return a schema with choices in place of conditions.

    A condition stays if no schema says when it is not met.

    Args:
        schema: The schema.
        find: Returns the schema that a reference means.
        around: Other schemas that its values match.
    """
    contrary = _Contrary(find, (schema, *around))
    beside = parts if isinstance(parts := schema.get("allOf"), list) else []
    if len(contrary.around) > _MAX_DEPTH or len(beside) > _MAX_PARTS:
        return dict(schema)
    opened = [_opened(part, contrary) for part in (schema, *beside)]
    choices = _combined([ways for _, found in opened for ways in found])
    fields, *others = (left for left, _ in opened)
    return {**fields, "allOf": [*others, *choices]} if _may_be(choices, schema) else dict(schema)


def _opened(part: Any, contrary: "_Contrary") -> tuple[Any, list[list[Parts]]]:  # noqa: ANN401
    """Return a schema without its conditions, and the ways to meet each of them."""
    if not isinstance(part, Mapping):
        return part, []
    fields, found = dict(part), list[list[Parts]]()
    for keywords, conditions in _conditions(part):
        try:
            found += [contrary.ways(*condition) for condition in conditions]
        except _UnknownError:
            continue
        fields = {key: value for key, value in fields.items() if key not in keywords}
    return fields, found


def _combined(found: Sequence[Sequence[Parts]]) -> list[dict[str, Any]]:
    """Return schemas of values that meet all conditions, in few choices of few ways each."""
    choices, combined = list[list[Parts]](), list[Parts]([[]])
    for ways in found:
        pairs = (_joined([*known, *way]) for known, way in product(combined, ways))
        more = [joined for joined in pairs if joined is not None]
        if len(more) > _MAX_WAYS:
            choices.append(combined)
            more = [*ways]
        combined = more
    choices += [combined] if found else []
    return [{"anyOf": [{"allOf": w} for w in ways]} if ways else {"not": {}} for ways in choices]


def _joined(parts: Parts) -> Parts | None:
    """Return the same schemas with one list of a property's values; nothing if it is empty.

    A grammar's cost is the product of its lists.
    """
    left, listed = Parts(), dict[str, list[Any]]()
    for part in parts:
        values = None
        match part:
            case {"type": "object", "properties": {**known}, "required": [str() as name], **rest}:
                values = _listed(known.get(name)) if known.keys() == {name} and not rest else None
        if values is None:
            left.append(part)
        else:
            before = listed.get(name, values)
            listed[name] = _those(values, _keys(before))
    if not all(listed.values()):
        return None
    return [*(_tagged(name, {"enum": values}) for name, values in listed.items()), *left]


def _may_be(choices: Sequence[object], schema: object) -> bool:
    """Return whether choices are few schemas, without copies of a condition inside."""
    (count, conditions), (_, own) = map(_weighed, (choices, schema))
    return bool(choices) and count <= _MAX_SCHEMAS and conditions <= own


def _weighed(value: object) -> tuple[int, int]:
    """Return how many schemas, and how many conditions, are in a value."""
    waiting, count, conditions = [value], 0, 0
    while waiting and count <= _MAX_SCHEMAS:
        part = waiting.pop()
        if isinstance(part, Mapping):
            count += 1
            conditions += len(_KEYWORDS & part.keys())
            waiting += part.values()
        waiting += part if isinstance(part, list) else ()
    return count, conditions


def _listed(schema: object) -> list[Any] | None:
    """Return the values of a schema that does nothing but list them."""
    match schema:
        case {"enum": [*values], **rest} if not rest.keys() - TEXTS:
            return values if len(values) <= _MAX_LISTED else None
        case {"const": value, **rest} if not rest.keys() - TEXTS:
            return [value]
    return None


def _tagged(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {name: schema}, "required": [name]}


def _conditions(part: Mapping[str, Any]) -> Iterator[tuple[Sequence[str], list[Condition]]]:
    """Yield the conditions of a schema, with the keywords that say them."""
    when, then, otherwise = (part.get(keyword, True) for keyword in ("if", "then", "else"))
    if "if" in part and all(map(_is_schema, (when, then, otherwise))):
        yield ("if", "then", "else"), [(when, then, otherwise)]
    refused = part.get("not", True)
    if _is_schema(refused) and refused not in (True, {}):
        yield ("not",), [(refused, False, True)]
    for keyword in ("dependentSchemas", "dependencies"):
        needs = part.get(keyword)
        if isinstance(needs, Mapping) and all(map(_is_schema, needs.values())):
            yield (keyword,), [({"required": [name]}, need, True) for name, need in needs.items()]


def _is_schema(value: object) -> bool:
    return isinstance(value, Mapping | bool)


@dataclass(frozen=True, slots=True)
class _Contrary:
    """Finds the schemas of values that do not match a schema.

    Attributes:
        around: Schemas that these values match in any case.
    """

    find: Find
    around: Sequence[Any]

    def ways(self, when: AnySchema, then: AnySchema, otherwise: AnySchema) -> list[Parts]:
        """Return the ways to meet a condition: the schemas that must all match.

        Raises:
            _UnknownError: There may be others.
        """
        met = [] if False in (when, then) else [[self._with_required(when), self._inside(then)]]
        others = [] if otherwise is False else self.of(when)
        left = self._inside(otherwise)
        ways = [*met, *([other, left] for other in others)]
        return [[part for part in way if part is not True] for way in ways]

    def _inside(self, part: AnySchema) -> AnySchema:
        """Return a schema of these values without conditions of its own."""
        if isinstance(part, bool):
            return part
        return with_open_conditions(part, self.find, self.around)

    def _with_required(self, when: AnySchema) -> AnySchema:
        """Return a condition with names required in any case: it excludes more of the others."""
        if not isinstance(when, Mapping) or self._types() != {"object"}:
            return when
        names = when.get("properties")
        if not isinstance(names, Mapping):
            return when
        lists = (schema.get("required") for schema in (when, *self._known()))
        required = [name for each in lists if isinstance(each, list) for name in each]
        return {**when, "type": "object", "required": [name for name in names if name in required]}

    def of(self, schema: object, depth: int = 0) -> Ways:
        """Return the schemas of the values that do not match a schema, of which one may be `{}`.

        Raises:
            _UnknownError: There may be others.
        """
        if isinstance(schema, bool):
            return [] if schema else [{}]
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            raise _UnknownError
        said = ((key, value) for key, value in schema.items() if key not in TEXTS)
        found = [way for key, value in said for way in self._of_keyword(key, value, depth + 1)]
        if len(found) > _MAX_WAYS:
            raise _UnknownError
        return found

    def _of_keyword(self, keyword: str, value: Any, depth: int) -> Ways:  # noqa: ANN401 (of JSON)
        if keyword in _BEYOND:
            return _beyond(keyword, value)
        of_schemas = {
            "$ref": self._of_reference,
            "not": self._of_not,
            "allOf": self._of_all,
            "anyOf": self._of_any,
            "properties": self._of_properties,
        }
        if keyword in of_schemas:
            return [way for part in of_schemas[keyword](value, depth) for way in part]
        if keyword in ("const", "enum"):
            return self._of_values([value] if keyword == "const" else _list(value))
        if keyword == "required":
            return [{"type": "object", "properties": {name: False}} for name in _names(value)]
        if keyword != "type":
            raise _UnknownError
        return self._of_types({*_names(value)})

    def _of_all(self, parts: object, depth: int) -> Iterator[Ways]:
        return (self.of(part, depth) for part in _list(parts))

    def _of_any(self, parts: object, depth: int) -> Iterator[Ways]:
        if len(_list(parts)) > _MAX_DEPTH:
            raise _UnknownError
        yield [{"allOf": list(way)} for way in product(*self._of_all(parts, depth))]

    def _of_reference(self, reference: object, depth: int) -> Iterator[Ways]:
        yield self.of(self.find(reference), depth)

    def _of_not(self, schema: object, _depth: int) -> Iterator[Ways]:
        if not isinstance(schema, Mapping):
            raise _UnknownError
        yield [dict(schema)]

    def _of_properties(self, parts: object, depth: int) -> Iterator[Ways]:
        if not isinstance(parts, Mapping):
            raise _UnknownError
        for name, part in parts.items():
            declared = (schema.get("properties") for schema in self._known())
            around = [known.get(name) for known in declared if isinstance(known, Mapping)]
            beside = _Contrary(self.find, around)
            yield [_tagged(name, way) for way in beside.of(part, depth)]

    def _known(self) -> Iterator[Mapping[str, Any]]:
        """Yield schemas that the values match: those around them, and those to which they lead."""
        waiting = list(self.around)
        for _ in range(_MAX_WAYS):
            schema = waiting.pop(0) if waiting else None
            if isinstance(schema, Mapping):
                yield schema
                waiting += [self.find(schema["$ref"])] if "$ref" in schema else []
                waiting += parts if isinstance(parts := schema.get("allOf"), list) else []

    def _types(self) -> set[str]:
        """Return the types that the values may have; `number` includes `integer`."""
        types = {*_TYPES}
        for schema in self._known():
            if names := {*_names(schema.get("type", []))}:
                is_whole = "integer" in names and "number" not in names
                types = {"integer" if is_whole and t == "number" else t for t in types}
                types &= names | ({"integer"} if "number" in names else set())
        return types

    def _of_types(self, names: set[str]) -> Ways:
        known = self._types()
        if names - {*_TYPES, "integer"} or ("integer" in names and "number" in known - names):
            raise _UnknownError
        left = known - names - ({"integer"} if "number" in names else set())
        return [{"type": sorted(left)}] if left else []

    def _of_values(self, values: Sequence[Any]) -> Ways:
        """Return the ways to be none of these values."""
        for schema in self._known():
            if "const" in schema or isinstance(schema.get("enum"), list):
                listed = [schema["const"]] if "const" in schema else schema["enum"]
                if len(listed) > _MAX_LISTED:
                    raise _UnknownError
                left = _those(listed, _keys(values), are_meant=False)
                return [{"enum": left}] if left else []
        return [way for name in sorted(self._types()) for way in _others(name, values)]


def _names(value: object) -> list[str]:
    names = [value] if isinstance(value, str) else _list(value)
    if not all(isinstance(name, str) for name in names):
        raise _UnknownError
    return names


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise _UnknownError
    return value


def _keys(values: Sequence[Any]) -> set[Any]:
    return set(map(_key, values))


def _key(value: Any) -> Any:  # noqa: ANN401 (of JSON)
    """Return the same only for equal values of JSON: in Python, true is 1."""
    return repr(value) if isinstance(value, bool | dict | list) else ("", value)


def _those(values: Sequence[Any], keys: Set[Any], *, are_meant: bool = True) -> list[Any]:
    """Return the values among the keys, or those that are not."""
    return [value for value in values if (_key(value) in keys) is are_meant]


def _others(name: str, values: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield the ways to be a value of a type, and none of these."""
    if any(isinstance(value, dict | list) for value in values) and name in ("object", "array"):
        raise _UnknownError
    numbers = sorted(value for value in values if is_number(value))
    texts = [value for value in values if isinstance(value, str)]
    if name in ("number", "integer") and numbers:
        yield from _between(name, [-inf, *numbers, inf])
    elif name == "string" and texts:
        yield {"type": "string", "pattern": _other_text(texts)}
    elif name == "boolean":
        left = _those((True, False), _keys(values), are_meant=False)
        yield from [{"enum": left}] if left else []
    elif name != "null" or None not in values:
        yield {"type": name}


def _between(name: str, numbers: Sequence[float]) -> Iterator[dict[str, Any]]:
    for low, high in pairwise(numbers):
        ends = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        if name == "number" or high - low > 1:
            yield {"type": name, **{key: end for key, end in ends.items() if isfinite(end)}}


def _beyond(keyword: str, value: object) -> Ways:
    name, other, step = _BEYOND[keyword]
    if not is_number(value) or (step and not isinstance(value, int)):
        raise _UnknownError
    return [{"type": name, other: value + step}] if value + step >= 0 or not step else []


def _other_text(texts: Sequence[str]) -> str:
    """Return a pattern of all texts but these."""
    if len(texts) > _MAX_TEXTS or sum(map(len, texts)) > _MAX_CHARS:
        raise _UnknownError
    begun = sorted({text[:length] for text in texts for length in range(len(text) + 1)})
    ways = [_spelled(start) for start in begun if start not in texts]
    for start in begun:
        following = {
            text[len(start)] for text in texts if len(text) > len(start) and text.startswith(start)
        }
        ways.append(f"{_spelled(start)}{_none_of(following)}(?s:.*)")
    return f"^(?:{'|'.join(ways)})$"


def _none_of(characters: set[str]) -> str:
    return f"[^{''.join(map(_spelled, sorted(characters)))}]" if characters else "(?s:.)"


def _spelled(text: str) -> str:
    return "".join(f"\\x{{{ord(character):X}}}" for character in text)
