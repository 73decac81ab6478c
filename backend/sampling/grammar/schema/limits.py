"""Limits on JSON schemas, each against input that llguidance 1.9.1 takes seconds for.

All were found by experiment: see the tests.
"""

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from backend.errors import GrammarError
from backend.sampling.grammar.gbnf.graph import longest_chain, reachable
from backend.sampling.grammar.schema.walk import SchemaTree

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
