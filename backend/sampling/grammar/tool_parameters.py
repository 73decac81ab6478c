"""The parameters of tools, the kinds of their values, and the rule of the calls in a reply."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from backend.core.prompt import Tool
from backend.errors import GrammarError
from backend.sampling.grammar.schema import (
    COMBINATIONS,
    IMPLIED_TYPES,
    AnySchema,
    Schema,
    part_at,
    require_bounded,
    steps,
    token,
    type_names,
    type_of,
    walk,
)
from backend.sampling.grammar.schema_normal import Normal
from backend.sampling.grammar.schema_repair import Notes, Repair
from backend.sampling.grammar.writer import ALWAYS
from common.last_used import LastUsed

MAX_PARALLEL_CALLS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRule:
    """The number of calls in a reply.

    Attributes:
        least: Minimum number.
        most: Maximum number: without one, a model at a high temperature does not stop.
        has_text: Whether text is allowed around calls; otherwise the reply is only calls.
    """

    least: int = 0
    most: int = MAX_PARALLEL_CALLS
    has_text: bool = True


# Unless one of these is there, the arguments are exactly the declared ones.
_OPENING = (
    *("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf"),
    *("$ref", "$dynamicRef", "$recursiveRef"),
)
_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "anyOf", "allOf", "prefixItems")
_SHAPES = frozenset({"type", "enum", "anyOf"})
_SCHEMAS = ("items", "additionalProperties")
# In the order in which they are left out.
_COSTLY = ("multipleOf", "patternProperties", "pattern")
_MAX_KEPT = 256
_MAX_KEPT_CHARS = 1 << 16
_OPEN: Schema = {"type": "object", "additionalProperties": True}


_Value = TypeVar("_Value")


class PerSchema(Generic[_Value]):
    """The values made of the schemas of tools, as long as there is room; thread-safe."""

    def __init__(self, make: Callable[[Tool], _Value]) -> None:
        self._make = make
        self._known: LastUsed[bytes, _Value] = LastUsed(_MAX_KEPT)

    def of(self, tool: Tool) -> _Value:
        """Return the value made of a tool; very large schemas are read each time."""
        text = json.dumps([tool.name, tool.parameters])
        if len(text) > _MAX_KEPT_CHARS:
            return self._make(tool)
        key = hashlib.sha256(text.encode()).digest()
        return self._known.find(key) or self._known.keep(key, self._make(tool))


class PartError(GrammarError):
    """A part of a tool's schema cannot be enforced in a format."""

    def __init__(self, tool: str, pointer: str, problem: str) -> None:
        super().__init__(f"tool {tool!r}: {pointer}: {problem}")
        self.pointer = pointer


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of one tool.

    Attributes:
        schema: Schema of an object in normal form, which is closed unless it says otherwise.
        notes: Reasons why parts of the tool's own schema are not in it, by pointer.
    """

    tool: str
    schema: Schema
    notes: Notes = field(default_factory=dict)

    @classmethod
    def of(cls, tool: Tool) -> "Parameters":
        """Return the parameters of a tool; parts of its schema that mean nothing are left out.

        Raises:
            GrammarError: No arguments are allowed.
        """
        normal = Normal(Repair(tool.parameters), is_object=True)
        if not isinstance(normal.root, Mapping):
            raise PartError(tool.name, "#", "the schema allows no object of arguments")
        root = dict(normal.root)
        is_lost = any(f"#/{keyword}" in normal.notes for keyword in ("properties", *_OPENING))
        is_opening = any(keyword in tool.parameters for keyword in _OPENING)
        if "type" in root and not is_lost and not is_opening:
            root["additionalProperties"] = False
        schema = root | ({"$defs": normal.definitions} if normal.definitions else {})
        return cls(tool.name, schema, normal.notes).bounded()

    def bounded(self) -> "Parameters":
        """Return the parameters without the parts that would keep llguidance busy for long."""
        weaker = self
        for keyword in _COSTLY:
            if weaker.is_bounded:
                return weaker
            for pointer, fields in walk(weaker.schema).schemas.items():
                if keyword in fields:
                    weaker = weaker.without(f"{pointer}/{keyword}", "takes too long to enforce")
        return weaker if weaker.is_bounded else self.without("#", "is too large")

    @property
    def is_bounded(self) -> bool:
        """Whether llguidance can read the schema in reasonable time."""
        try:
            require_bounded(walk(self.schema))
        except GrammarError:
            return False
        return True

    @property
    def may_lack_texts(self) -> bool:
        """Whether no text might meet the conditions on one: a pattern, or a format and others."""
        conditions = IMPLIED_TYPES["string"]
        return any(
            "pattern" in fields or ("format" in fields and len(conditions & fields.keys()) > 1)
            for fields in walk(self.schema).schemas.values()
        )

    def error(self, pointer: str, problem: str) -> PartError:
        """Return an error saying that a part of the schema cannot be enforced."""
        return PartError(self.tool, pointer, problem)

    def require_only(self, kind: "Kind", keywords: Iterable[str], where: str) -> None:
        """Refuse a kind of value with other conditions than these.

        Raises:
            PartError: It has one.
        """
        for keyword in sorted(kind.constraints(*keywords)):
            raise self.error(f"{kind.pointer}/{keyword}", f"cannot be enforced {where}")

    def at(self, pointer: str) -> Any:  # noqa: ANN401 (a part of JSON)
        """Return the part at a pointer, or `None`."""
        return part_at(self.schema, pointer)

    def without(self, pointer: str, reason: str) -> "Parameters":
        """Return weaker parameters: without a keyword, or with any value for a part."""
        schema: Schema = _OPEN
        part, path = self.at(pointer), steps(pointer)
        if path and part is not None and part is not True:
            schema = _without(self.schema, path, is_map=False)
            if not _SHAPES & schema.keys():
                schema = {"type": "object", **schema}
        return replace(self, schema=schema, notes={**self.notes, pointer: reason})

    @property
    def is_open(self) -> bool:
        """Whether nothing is known about the arguments."""
        return self.schema is _OPEN


def _without(part: Any, path: list[str], *, is_map: bool) -> Any:  # noqa: ANN401 (JSON)
    """Return a copy of a part of a schema without a keyword, or with any value for a schema.

    The part is a schema, or schemas by name (`is_map`) or in a list.
    """
    step, *rest = path
    if isinstance(part, list):
        inner = _without(part[int(step)], rest, is_map=False) if rest else True
        return [inner if index == int(step) else each for index, each in enumerate(part)]
    if rest:
        inner = _without(part[step], rest, is_map=not is_map and step in _OF_SCHEMAS)
    elif is_map or step in _SCHEMAS:
        inner = True
    else:
        return {key: value for key, value in part.items() if key != step}
    return {key: inner if key == step else value for key, value in part.items()}


_MAX_SCHEMAS = 512
_OF_TYPES = {**IMPLIED_TYPES, "integer": IMPLIED_TYPES["number"]}
_CONSTRAINTS = COMBINATIONS.union({"type", "const", "enum"}, *IMPLIED_TYPES.values())
OF_OBJECTS = frozenset({"properties", "required", "additionalProperties"})
OF_ARRAYS = frozenset({"items", "minItems", "maxItems"})


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of value.

    Attributes:
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
            return type_of(self.schema["const"])
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
    parameters.require_only(kind, OF_OBJECTS, "in this format")
    required, here = kind.schema.get("required", ()), f"{kind.pointer}/properties"
    return [
        Property(name, f"{here}/{token(name)}", part, is_required=name in required)
        for name, part in kind.schema.get("properties", {}).items()
        if part is not False or name in required
    ]


# llguidance gives a rule so many bits to remember.
_MOST_BITS = 64


@dataclass(frozen=True, slots=True)
class Group:
    """Members of an object of which each comes at most once, in any order: JSON has none.

    Attributes:
        items: Members by their bits, which are set once they are written; required ones first.
        required: The number of required ones.
    """

    items: tuple[Property, ...]
    required: int

    @property
    def is_complete(self) -> str:
        """Condition under which no member is needed any more."""
        return f"is_ones([0:{self.required}])" if self.required else ALWAYS

    @property
    def has_more(self) -> str:
        """Condition under which a member may follow."""
        return f"not(is_ones([0:{len(self.items)}]))"


def groups(items: Sequence[Property]) -> list[Group]:
    """Return the members of an object in groups that come one after another; few are one."""
    found = []
    for begin in range(0, len(items), _MOST_BITS):
        part = items[begin : begin + _MOST_BITS]
        ordered = sorted(part, key=lambda item: not item.is_required)
        found.append(Group(tuple(ordered), sum(item.is_required for item in part)))
    return found


def _kinds(
    pointer: str, schema: AnySchema, parameters: Parameters, around: frozenset[str], known: set[str]
) -> Iterator[Kind]:
    """Yield the kinds of values of a schema, except those of the `known` locations."""
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
        yield Kind(pointer, frozenset({type_of(value)}), {"const": value})
    if "enum" in schema:
        return
    for name in sorted(types):
        meant = {*_OF_TYPES.get(name, ()), *COMBINATIONS}
        own = {keyword: value for keyword, value in schema.items() if keyword in meant}
        yield Kind(pointer, frozenset({name}), {"type": name, **own})
    if not types:
        yield Kind(pointer, types, schema)
