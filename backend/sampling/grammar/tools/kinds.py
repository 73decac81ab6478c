"""The values that a schema allows, one kind at a time, for formats that are not JSON throughout."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import unquote

from backend.sampling.grammar.schema.tight import AnySchema, Schema, type_names
from backend.sampling.grammar.tools.parameters import Parameters

_MAX_SCHEMAS = 512
_COMBINATIONS = ("$ref", "allOf", "anyOf", "oneOf")
_OF_NUMBERS = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
# The keywords that say something about values of a type.
_OF_TYPES = {
    "string": frozenset({"pattern", "format", "minLength", "maxLength"}),
    "integer": _OF_NUMBERS,
    "number": _OF_NUMBERS,
    "array": frozenset({"items", "prefixItems", "additionalItems", "minItems", "maxItems"}),
    "object": frozenset(
        {
            *("properties", "required", "additionalProperties"),
            *("patternProperties", "minProperties", "maxProperties"),
        }
    ),
}
_CONSTRAINTS = frozenset[str]().union({"type", "const", "enum"}, _COMBINATIONS, *_OF_TYPES.values())
# A bool is an int to Python: the order matters.
_TYPES_OF_VALUES: tuple[tuple[type, str], ...] = (
    *((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string")),
    *((dict, "object"), (list, "array"), (type(None), "null")),
)
_IMPLIED_TYPES = {"properties": "object", "items": "array"}


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of value.

    Attributes:
        pointer: Where in the schema of the tool it stands.
        types: The JSON types that a reader may take it for; none where nothing is said.
        schema: The conditions; `const` for a single value.
    """

    pointer: str
    types: frozenset[str]
    schema: Schema

    @property
    def is_text(self) -> bool:
        """Whether it is written as a string, or may be."""
        if "const" in self.schema:
            return isinstance(self.schema["const"], str)
        return not self.types or "string" in self.types

    @property
    def type_name(self) -> str:
        """The JSON type of these values: of the single one, or the first that they may have."""
        if "const" in self.schema:
            return _type_of(self.schema["const"])
        return min(self.types, default="string")

    def constraints(self, *expected: str) -> frozenset[str]:
        """Return the keywords that restrict these values, but for the expected ones."""
        return _CONSTRAINTS & self.schema.keys() - {"type", *expected}


@dataclass(frozen=True, slots=True)
class Property:
    """One property of an object."""

    name: str
    pointer: str
    schema: AnySchema
    is_required: bool


def kinds(pointer: str, schema: AnySchema, parameters: Parameters) -> list[Kind]:
    """Return the kinds of values that a schema allows.

    Raises:
        GrammarError: It combines schemas in a way that cannot be taken apart.
    """
    found = list(_kinds(pointer, schema, parameters, frozenset(), set()))
    if not found:
        raise parameters.error(pointer, "no value is allowed")
    return found


def arguments(parameters: Parameters) -> Kind:
    """Return the kind of a tool's arguments: an object.

    Raises:
        GrammarError: There are several kinds.
    """
    schema = parameters.schema
    if any(keyword in schema for keyword in _COMBINATIONS):
        schema = {keyword: value for keyword, value in schema.items() if keyword != "type"}
    match kinds("#", schema, parameters):
        case [kind] if kind.types == {"object"}:
            return kind
    raise parameters.error("#", "the arguments are not simply an object with properties")


def properties(kind: Kind, parameters: Parameters) -> list[Property]:
    """Return the properties of an object, in the order of the schema, undeclared ones last.

    Raises:
        GrammarError: They are restricted in other ways than one by one.
    """
    for keyword in sorted(kind.constraints("properties", "required", "additionalProperties")):
        raise parameters.error(f"{kind.pointer}/{keyword}", "cannot be enforced in this format")
    declared: Schema = kind.schema.get("properties", {})
    required = kind.schema.get("required", [])
    return [
        Property(
            name,
            f"{kind.pointer}/properties/{name}",
            declared.get(name, True),
            is_required=name in required,
        )
        for name in dict.fromkeys((*declared, *required))
    ]


def _kinds(
    pointer: str,
    schema: AnySchema,
    parameters: Parameters,
    around: frozenset[str],
    known: set[str],
) -> Iterator[Kind]:
    """Yield the kinds of values of a schema, but for those of schemas that are known already.

    Args:
        pointer: Where the schema stands.
        schema: The schema.
        parameters: Of the tool.
        around: Where the schemas stand that this one is a part of.
        known: Where all schemas stand that were looked at.
    """
    if schema is False or pointer in around:
        raise parameters.error(pointer, "no value is allowed")
    if pointer in known:
        return
    known.add(pointer)
    if len(known) > _MAX_SCHEMAS:
        raise parameters.error(pointer, f"more than {_MAX_SCHEMAS} schemas are combined")
    fields: Schema = schema if isinstance(schema, Mapping) else {}
    combination = next((keyword for keyword in _COMBINATIONS if keyword in fields), None)
    if combination is None or "type" in fields:
        yield from _simple_kinds(pointer, fields)
        return
    if others := _CONSTRAINTS & fields.keys() - {combination}:
        raise parameters.error(f"{pointer}/{min(others)}", f"stands next to {combination!r}")
    if combination == "allOf" and len(fields["allOf"]) > 1:
        raise parameters.error(f"{pointer}/allOf", "cannot be enforced in this format")
    for place, part in _parts(combination, pointer, fields, parameters):
        yield from _kinds(place, part, parameters, around | {pointer}, known)


def _parts(
    combination: str, pointer: str, fields: Schema, parameters: Parameters
) -> Iterator[tuple[str, AnySchema]]:
    if combination == "$ref":
        yield fields["$ref"], _referred(fields["$ref"], parameters)
    else:
        for index, part in enumerate(fields[combination]):
            yield f"{pointer}/{combination}/{index}", part


def _referred(reference: str, parameters: Parameters) -> AnySchema:
    """Return the schema that a reference means; it is known to lead to one."""
    found: object = parameters.schema
    for step in unquote(reference).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        found = found[int(name)] if isinstance(found, list) else cast("Schema", found)[name]
    return cast("AnySchema", found)


def _simple_kinds(pointer: str, schema: Schema) -> Iterator[Kind]:
    types = type_names(schema)
    if not types:
        types = frozenset(name for mark, name in _IMPLIED_TYPES.items() if mark in schema)
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        for value in values:
            name = _type_of(value)
            if not types or name in types or (name == "integer" and "number" in types):
                yield Kind(pointer, types or frozenset({name}), {"const": value})
        return
    for name in sorted(types):
        meant = {*_OF_TYPES.get(name, ()), *_COMBINATIONS}
        own = {keyword: value for keyword, value in schema.items() if keyword in meant}
        yield Kind(pointer, frozenset({name}), {"type": name, **own})
    if not types:
        yield Kind(pointer, types, schema)


def _type_of(value: object) -> str:
    return next(name for kind, name in _TYPES_OF_VALUES if isinstance(value, kind))
