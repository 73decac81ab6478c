"""The parameters of tools, as far as a grammar can enforce them."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from backend.core.prompt import Tool
from backend.errors import GrammarError
from backend.sampling.grammar.last_used import LastUsed
from backend.sampling.grammar.schema.limits import require_bounded
from backend.sampling.grammar.schema.normal import Normal
from backend.sampling.grammar.schema.repair import Notes, Repair
from backend.sampling.grammar.schema.tight import Schema
from backend.sampling.grammar.schema.walk import walk

# Unless one of these is there, the arguments are exactly the declared ones.
_OPENING = (
    *("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf"),
    *("$ref", "$dynamicRef", "$recursiveRef"),
)
_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "anyOf", "allOf", "prefixItems")
_ON_TEXTS = frozenset({"pattern", "format", "minLength", "maxLength"})
_SHAPES = frozenset({"type", "enum", "anyOf"})
_SCHEMAS = ("items", "additionalProperties")
# In the order in which they are left out.
_COSTLY = ("multipleOf", "patternProperties", "pattern")
_MAX_KEPT = 256
_MAX_KEPT_CHARS = 1 << 16
_OPEN: Schema = {"type": "object", "additionalProperties": True}


_Value = TypeVar("_Value")


class PerSchema(Generic[_Value]):
    """What was made of the schema of each tool, as long as there is room; thread-safe."""

    def __init__(self, make: Callable[[Tool], _Value]) -> None:
        self._make = make
        self._known: LastUsed[bytes, _Value] = LastUsed(_MAX_KEPT)

    def of(self, tool: Tool) -> _Value:
        """Return what is made of a tool; very large schemas are read each time."""
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
        """Return the parameters without what would keep llguidance busy for long."""
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
    def combines_texts(self) -> bool:
        """Whether a text must meet several conditions, which none might."""
        schemas = walk(self.schema).schemas.values()
        return any("pattern" in fields or "format" in fields for fields in schemas) and any(
            len(_ON_TEXTS & fields.keys()) > 1 for fields in schemas
        )

    def error(self, pointer: str, problem: str) -> PartError:
        """Return an error saying that a part of the schema cannot be enforced."""
        return PartError(self.tool, pointer, problem)

    def at(self, pointer: str) -> Any:  # noqa: ANN401 (a part of JSON)
        """Return the part at a pointer, or `None`."""
        found: Any = self.schema
        for step in _steps(pointer):
            try:
                found = found[int(step) if isinstance(found, list) else step]
            except (LookupError, TypeError, ValueError):
                return None
        return found

    def without(self, pointer: str, reason: str) -> "Parameters":
        """Return weaker parameters: without a keyword, or with any value for a part."""
        schema: Schema = _OPEN
        part, steps = self.at(pointer), _steps(pointer)
        if steps and part is not None and part is not True:
            schema = _without(self.schema, steps, is_map=False)
            if not _SHAPES & schema.keys():
                schema = {"type": "object", **schema}
        return replace(self, schema=schema, notes={**self.notes, pointer: reason})

    @property
    def is_open(self) -> bool:
        """Whether nothing is known about the arguments."""
        return self.schema is _OPEN


def _steps(pointer: str) -> list[str]:
    return [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]


def _without(part: Any, steps: list[str], *, is_map: bool) -> Any:  # noqa: ANN401 (JSON)
    """Return a copy of a part of a schema without a keyword, or with any value for a schema.

    The part is a schema, or schemas by name (`is_map`) or in a list.
    """
    step, *rest = steps
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
