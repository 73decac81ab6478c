"""Finds the subschemas of a JSON schema, and checks their keywords.

llguidance ignores unknown keywords. Here they are errors unless they only annotate, because
their authors expect them to have an effect.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from backend.errors import GrammarError

# Keywords by their value: a schema, a list of schemas, or schemas by name.
_ONE = frozenset({"items", "additionalItems", "additionalProperties"})
_LIST = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_NAMED = frozenset({"properties", "patternProperties"})
_DEFINITIONS = frozenset({"$defs", "definitions"})
_ASSERTIONS = frozenset(
    {
        *("const", "enum", "type", "$ref", "required", "pattern", "format", "multipleOf"),
        *("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    }
)
_ANNOTATIONS = frozenset(
    {
        *("$schema", "$id", "id", "$anchor", "$comment", "title", "description", "default"),
        *("example", "examples", "deprecated", "readOnly", "writeOnly"),
        *("contentMediaType", "contentEncoding"),
    }
)
_KEYWORDS = _ONE | _LIST | _NAMED | _DEFINITIONS | _ASSERTIONS | _ANNOTATIONS
_EXTENSION = "x-"
# Its settings would loosen the checks.
_SETTINGS = "x-guidance"

_STRING_FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uuid", "uri"),
    }
)
# From OpenAPI; they tell how a number is stored, not how it is written.
_NUMBER_FORMATS = frozenset({"int32", "int64", "float", "double"})


@dataclass(frozen=True, slots=True)
class SchemaTree:
    """All subschemas, by JSON pointer.

    Attributes:
        edges: Pointers to the parts of a subschema, and to the target of its `$ref`.
            Definitions are not parts.
    """

    schemas: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    edges: dict[str, list[str]] = field(default_factory=dict)


def walk(schema: Mapping[str, Any]) -> SchemaTree:
    """Return the subschemas.

    Raises:
        GrammarError: A keyword is unsupported or unknown; the message says where.
    """
    tree = SchemaTree()
    pending: list[tuple[str, object]] = [("#", schema)]
    while pending:
        pointer, subschema = pending.pop()
        if not isinstance(subschema, dict | bool):
            raise GrammarError(f"{pointer}: a schema is an object or a boolean")
        fields = subschema if isinstance(subschema, dict) else {}
        _require_supported(pointer, fields)
        parts = list(_parts(pointer, fields))
        tree.schemas[pointer] = fields
        tree.edges[pointer] = [part for part, _, is_definition in parts if not is_definition]
        pending += [(part, value) for part, value, _ in parts]
    for pointer, known in tree.schemas.items():
        if "$ref" in known:
            tree.edges[pointer].append(_target(pointer, known["$ref"], tree))
    return tree


def _require_supported(pointer: str, fields: Mapping[str, Any]) -> None:
    for keyword in fields:
        is_extension = keyword.startswith(_EXTENSION) and keyword != _SETTINGS
        if keyword not in _KEYWORDS and not is_extension:
            raise GrammarError(f"{pointer}: the keyword {keyword!r} is not supported")
        if keyword in {"$id", "id"} and pointer != "#":
            raise GrammarError(f"{pointer}: {keyword!r} is only supported at the root")
    known = fields.get("format", "uuid")
    if not isinstance(known, str) or known not in _STRING_FORMATS | _NUMBER_FORMATS:
        raise GrammarError(f"{pointer}: the format {known!r} is not supported")


def _parts(pointer: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, object, bool]]:
    """Yield the parts of a subschema: pointer, value, and whether it is only a definition."""
    for keyword, value in fields.items():
        here = f"{pointer}/{keyword}"
        if keyword in _LIST or (keyword == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise GrammarError(f"{here}: must be a list of schemas")
            yield from ((f"{here}/{index}", part, False) for index, part in enumerate(value))
        elif keyword in _ONE:
            yield here, value, False
        elif keyword in _NAMED | _DEFINITIONS:
            if not isinstance(value, dict):
                raise GrammarError(f"{here}: must be an object with schemas")
            is_definition = keyword in _DEFINITIONS
            yield from ((f"{here}/{_token(k)}", part, is_definition) for k, part in value.items())


def _target(pointer: str, reference: object, tree: SchemaTree) -> str:
    """Return the pointer that a reference denotes, which must lead to a subschema."""
    if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
        raise GrammarError(f"{pointer}: $ref must point into the schema itself, as '#/...'")
    target = unquote(reference)
    if target not in tree.schemas:
        raise GrammarError(f"{pointer}: there is no schema at {reference!r}")
    return target


def _token(name: str) -> str:
    """Return a name escaped for a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")
