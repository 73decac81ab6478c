"""Finds the subschemas of a JSON schema, and checks their keywords.

llguidance ignores unknown keywords. Here they are errors unless they only annotate, because
their authors expect them to have an effect.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from backend.errors import GrammarError, GrammarSyntaxError
from backend.sampling.grammar.gbnf_rules import longest_chain, reachable
from backend.sampling.grammar.schema_tight import with_short_numbers
from backend.sampling.grammar.writer import LarkGrammar

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


MAX_SCHEMAS = 10_000
MAX_REFERENCES = 500
MAX_LEVELS = 4000
# Optional properties cost their number squared; pattern properties too, and far more.
MAX_OPTIONAL_COST = 1_000_000
MAX_PATTERN_PROPERTIES = 64
# Patterns that must all match cost two to the power of their number.
MAX_COMBINED_PATTERNS = 10
# A multiple costs its significant digits, read as a number.
MAX_MULTIPLES = 20_000

_COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
_CONSTRAINING = (
    *("properties", "patternProperties", "additionalProperties", "items", "prefixItems"),
    *("const", "enum", "pattern", "format", "multipleOf", "minLength", "maxLength"),
)


def require_bounded(tree: SchemaTree) -> None:
    """Refuse a schema that would crash llguidance or keep it busy for long.

    Raises:
        GrammarError: The schema is too large in some respect.
    """
    schemas = tree.schemas
    if len(schemas) > MAX_SCHEMAS:
        raise GrammarError(f"there are more than {MAX_SCHEMAS} schemas in the schema")
    references = {pointer: int("$ref" in fields) for pointer, fields in schemas.items()}
    if longest_chain(tree.edges, references) > MAX_REFERENCES:
        raise GrammarError(f"references lead to references more than {MAX_REFERENCES} deep")
    if longest_chain(tree.edges, dict.fromkeys(schemas, 1)) > MAX_LEVELS:
        raise GrammarError(f"schemas nest more than {MAX_LEVELS} deep")
    if sum(_optional_properties(fields) ** 2 for fields in schemas.values()) > MAX_OPTIONAL_COST:
        raise GrammarError("there are too many optional properties")
    if sum(map(_pattern_properties, schemas.values())) > MAX_PATTERN_PROPERTIES:
        raise GrammarError(f"there are more than {MAX_PATTERN_PROPERTIES} pattern properties")
    _require_cheap_combinations(tree)
    if sum(_multiples(schemas.values())) > MAX_MULTIPLES:
        raise GrammarError("the values of 'multipleOf' are too large")


def _require_cheap_combinations(tree: SchemaTree) -> None:
    """Limit the conditions that may apply to one value."""
    combining = [pointer for pointer, fields in tree.schemas.items() if _combines(fields)]
    combined = [tree.schemas[pointer] for pointer in reachable(combining, tree.edges)]
    patterns = {str(fields["pattern"]) for fields in combined if "pattern" in fields}
    if len(patterns) > MAX_COMBINED_PATTERNS:
        raise GrammarError(f"more than {MAX_COMBINED_PATTERNS} patterns are combined")
    product = 1
    for multiple in _multiples(combined):
        product *= max(multiple, 1)
    if product > MAX_MULTIPLES:
        raise GrammarError("the combined values of 'multipleOf' are too large")


def _combines(fields: Mapping[str, Any]) -> bool:
    """Return whether several parts of a schema constrain the same value."""
    combining = sum(keyword in fields for keyword in _COMBINING)
    constrains = any(keyword in fields for keyword in _CONSTRAINING)
    return combining + constrains > 1 or len(fields.get("allOf", ())) > 1


def _optional_properties(fields: Mapping[str, Any]) -> int:
    required = fields.get("required")
    names = {str(name) for name in required} if isinstance(required, list) else set()
    return len(fields.get("properties", {}).keys() - names)


def _pattern_properties(fields: Mapping[str, Any]) -> int:
    return len(fields.get("patternProperties", {}))


def _multiples(schemas: Iterable[Mapping[str, Any]]) -> set[int]:
    """Return the significant digits of all multiples: 75 for 750 and for 0.75."""
    values = (fields.get("multipleOf") for fields in schemas)
    digits = {Decimal(str(v)).as_tuple().digits for v in values if isinstance(v, int | float)}
    return {int("".join(map(str, number)).rstrip("0") or "0") for number in digits}


MAX_NESTING = 120

SETTINGS = {
    "whitespace_flexible": False,
    "item_separator": ",",
    "key_separator": ":",
    # Models write "\\u00e9" as well as "é".
    "json_allow_general_unicode_escapes": True,
}


def schema_to_lark(text: str) -> LarkGrammar:
    """Return the grammar of the JSON values allowed by a schema.

    Raises:
        GrammarError: The text is not a schema, or cannot be enforced.
    """
    schema = _parsed(text)
    require_bounded(walk(schema))
    fields = {**with_short_numbers(schema), "x-guidance": SETTINGS}
    return LarkGrammar("%json " + json.dumps(fields))


def _parsed(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except json.JSONDecodeError as error:
        raise GrammarSyntaxError(error.lineno, error.colno, f"not JSON: {error.msg}") from error
    except (RecursionError, ValueError) as error:
        raise GrammarError(
            "this JSON cannot be read: it nests too deep, or has a huge number"
        ) from error
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema is an object, or true")
    if _nesting(schema) > MAX_NESTING:
        raise GrammarError(f"the JSON schema nests more than {MAX_NESTING} deep")
    return schema


def _nesting(value: object) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        lists = [
            v if isinstance(v, list) else list(v.values())
            for v in level
            if isinstance(v, list | dict)
        ]
        level = [inner for values in lists for inner in values]
    return depth
