"""The types of a tool's arguments, from its JSON schema.

Only types are read: checking values is up to the tool.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, islice
from typing import TypeAlias, cast

from backend.core.prompt import JsonValue

JsonSchema: TypeAlias = Mapping[str, JsonValue]
JsonTypes: TypeAlias = frozenset[str]

UNKNOWN: JsonTypes = frozenset()
STRING: JsonTypes = frozenset({"string"})
SCALARS: JsonTypes = frozenset({"number", "integer", "boolean", "null"})
NOT_A_STRING: JsonTypes = SCALARS | {"object", "array"}

_MAX_SCHEMAS = 256
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
# A bool is an int in Python: the order matters.
_TYPE_NAMES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (Mapping, "object"),
    (type(None), "null"),
    (object, "array"),
)
_MARKS = {"properties": "object", "items": "array"}


class ParameterTypes:
    """The names and types of a tool's arguments.

    Attributes:
        required: The names of those that a call must have.
        takes_others: Whether the schema expressly allows arguments that it does not declare.
    """

    def __init__(self, schema: JsonSchema, root: JsonSchema | None = None) -> None:
        """Read a schema; its references are relative to `root`, or to itself."""
        self._root = root or schema
        self._properties: JsonSchema = {}
        self.takes_others = False
        for way in self._alternatives(schema):
            self._properties = {**_mapping(way.get("properties")), **self._properties}
            self.takes_others |= way.get("additionalProperties") is True
        self._is_open = self.takes_others or not self._properties
        self.required = frozenset(
            name for name in _sequence(schema.get("required")) if isinstance(name, str)
        )

    @property
    def names(self) -> Collection[str]:
        """Declared names in schema order."""
        return self._properties.keys()

    def is_declared(self, name: str) -> bool:
        """Tell whether an argument may have this name; any name may without declarations."""
        return self._is_open or name in self._properties

    def fit(self, keys: Set[str]) -> bool:
        """Tell whether arguments with these names are complete, and all of them declared."""
        return self.required <= keys and all(map(self.is_declared, keys))

    def of(self, name: str) -> JsonTypes:
        """Return the JSON types that an argument may have."""
        found = UNKNOWN
        is_nullable = False
        for schema in self._alternatives(self._properties.get(name)):
            found |= _named_types(schema)
            is_nullable |= schema.get("nullable") is True
        return found | {"null"} if found and is_nullable else found

    def inside(self, name: str) -> "ParameterTypes":
        """Return the types of the values inside an argument: its properties, or each `item`."""
        properties: dict[str, JsonValue] = {}
        for schema in self._alternatives(self._properties.get(name)):
            if "items" in schema:
                properties.setdefault("item", schema["items"])
            for key, value in _mapping(schema.get("properties")).items():
                properties.setdefault(key, value)
        return ParameterTypes({"properties": properties}, self._root)

    def _alternatives(self, value: JsonValue) -> Iterator[JsonSchema]:
        """Yield a schema and those that it combines: each once, up to a limit."""
        waiting = deque([_mapping(value)])
        known: set[int] = set()
        while waiting and len(known) < _MAX_SCHEMAS:
            schema = self._resolved(waiting.popleft())
            if id(schema) in known:
                continue
            known.add(id(schema))
            yield schema
            others = chain.from_iterable(_sequence(schema.get(key)) for key in _ALTERNATIVES)
            waiting.extend(map(_mapping, islice(others, _MAX_SCHEMAS)))
            if "$ref" in schema:
                waiting.append(schema)

    def _resolved(self, schema: JsonSchema) -> JsonSchema:
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        place: JsonValue = self._root
        for part in reference.removeprefix("#/").split("/"):
            place = _mapping(place).get(part.replace("~1", "/").replace("~0", "~"))
        return _mapping(place)


def json_type(value: object) -> str:
    """Return the JSON type of a parsed value; integers do not count as numbers."""
    return next(name for kind, name in _TYPE_NAMES if isinstance(value, kind))


def _named_types(schema: JsonSchema) -> JsonTypes:
    """Return the types that a schema names, or implies by its allowed values."""
    match schema.get("type"):
        case str(name):
            return frozenset({name})
        case [*names]:
            return frozenset(name for name in names if isinstance(name, str))
    if "const" in schema:
        return frozenset({json_type(schema["const"])})
    if values := _sequence(schema.get("enum")):
        return frozenset(map(json_type, values))
    return frozenset(name for key, name in _MARKS.items() if key in schema)


def _mapping(value: JsonValue) -> JsonSchema:
    return value if isinstance(value, Mapping) else {}


def _sequence(value: JsonValue) -> Iterable[JsonValue]:
    is_sequence = isinstance(value, Sequence) and not isinstance(value, str)
    return cast("Sequence[JsonValue]", value) if is_sequence else ()
