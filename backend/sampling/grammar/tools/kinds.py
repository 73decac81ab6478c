"""Splits a schema into kinds of values, for formats that are not pure JSON."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from backend.sampling.grammar.schema.repair import token
from backend.sampling.grammar.schema.tight import AnySchema, Schema, type_names
from backend.sampling.grammar.tools.parameters import Parameters

_MAX_SCHEMAS = 512
_COMBINATIONS = ("$ref", "allOf", "anyOf", "oneOf")
_OF_NUMBERS = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
# Keywords that apply to values of one type.
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
# A bool is an int in Python: the order matters.
_TYPES_OF_VALUES: tuple[tuple[type, str], ...] = (
    *((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string")),
    *((dict, "object"), (list, "array"), (type(None), "null")),
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of value.

    Attributes:
        pointer: Its location in the tool's schema.
        types: JSON types that a reader may take it for; empty if unspecified.
        schema: The conditions; `const` for a single value.
    """

    pointer: str
    types: frozenset[str]
    schema: Schema

    @property
    def is_text(self) -> bool:
        """Whether it is, or may be, written as a string."""
        if "const" in self.schema:
            return isinstance(self.schema["const"], str)
        return not self.types or "string" in self.types

    @property
    def type_name(self) -> str:
        """JSON type of the values: that of the single value, or the first possible one."""
        if "const" in self.schema:
            return _type_of(self.schema["const"])
        return min(self.types, default="string")

    def constraints(self, *expected: str) -> frozenset[str]:
        """Return the keywords that restrict these values, except the expected ones."""
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
        GrammarError: It combines schemas in a way that cannot be split.
    """
    found = list(_kinds(pointer, schema, parameters, frozenset(), set()))
    if not found:
        raise parameters.error(pointer, "no value is allowed")
    return found


def arguments(parameters: Parameters) -> list[Kind]:
    """Return the kinds of a tool's arguments, each an object.

    Raises:
        GrammarError: They cannot be split into such.
    """
    found = kinds("#", parameters.schema, parameters)
    if any(kind.types != {"object"} or "const" in kind.schema for kind in found):
        raise parameters.error("#", "the arguments are not simply an object with properties")
    return found


def properties(kind: Kind, parameters: Parameters) -> list[Property]:
    """Return the properties of an object in schema order.

    Raises:
        GrammarError: They are restricted other than one by one.
    """
    for keyword in sorted(kind.constraints("properties", "required", "additionalProperties")):
        raise parameters.error(f"{kind.pointer}/{keyword}", "cannot be enforced in this format")
    required, here = kind.schema.get("required", ()), f"{kind.pointer}/properties"
    return [
        Property(name, f"{here}/{token(name)}", part, is_required=name in required)
        for name, part in kind.schema.get("properties", {}).items()
        if part is not False or name in required
    ]


def _kinds(
    pointer: str,
    schema: AnySchema,
    parameters: Parameters,
    around: frozenset[str],
    known: set[str],
) -> Iterator[Kind]:
    """Yield the kinds of values of a schema, except those of schemas already visited.

    Args:
        pointer: Location of the schema.
        schema: The schema.
        parameters: The tool's parameters.
        around: Locations of the schemas that contain this one.
        known: Locations of all visited schemas.
    """
    if schema is False or pointer in around:
        raise parameters.error(pointer, "no value is allowed")
    if pointer in known:
        return
    known.add(pointer)
    if len(known) > _MAX_SCHEMAS:
        raise parameters.error(pointer, f"more than {_MAX_SCHEMAS} schemas are combined")
    fields: Schema = schema if isinstance(schema, Mapping) else {}
    if not {"$ref", "anyOf"} & fields.keys():
        yield from _simple_kinds(pointer, fields)
    for place in _parts(pointer, fields):
        part = parameters.at(place)
        yield from _kinds(place, part, parameters, around | {pointer}, known)


def _parts(pointer: str, fields: Schema) -> Iterator[str]:
    """Yield the pointers of the schemas of which a value matches one."""
    if "$ref" in fields:
        yield fields["$ref"]
    yield from (f"{pointer}/anyOf/{index}" for index in range(len(fields.get("anyOf", ()))))


def _simple_kinds(pointer: str, schema: Schema) -> Iterator[Kind]:
    types = type_names(schema)
    for value in schema.get("enum", ()):
        yield Kind(pointer, frozenset({_type_of(value)}), {"const": value})
    if "enum" in schema:
        return
    for name in sorted(types):
        meant = {*_OF_TYPES.get(name, ()), *_COMBINATIONS}
        own = {keyword: value for keyword, value in schema.items() if keyword in meant}
        yield Kind(pointer, frozenset({name}), {"type": name, **own})
    if not types:
        yield Kind(pointer, types, schema)


def _type_of(value: object) -> str:
    return next(name for kind, name in _TYPES_OF_VALUES if isinstance(value, kind))
