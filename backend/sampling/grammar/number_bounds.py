"""Bounds of numbers in JSON schemas, as llguidance holds them exactly: it reads them as doubles."""

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

# Beyond it, doubles do not tell integers apart; readers such as JavaScript's have nothing else.
LARGEST = 2**53
# The largest double whose neighbours all fit into 64 bits.
LARGEST_INTEGER = 2**63 - 1024
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def with_exact_bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with bounds that are doubles, none of them beyond the largest numbers.

    A bound that leaves no number is kept.
    """
    fields, end = dict(schema), largest_of(schema)
    for (bound, exclusive), sign in ((_LOWER, 1), (_UPPER, -1)):
        if end == LARGEST_INTEGER:
            _include(fields, bound, exclusive, sign)
        for keyword in (bound, exclusive):
            if is_number(fields.get(keyword)) and fields[keyword] * sign <= -end:
                del fields[keyword]
                fields.setdefault(bound, -end * sign)
    return fields


def largest_of(schema: Mapping[str, Any]) -> int:
    """Return the largest number that a schema may allow."""
    types = schema.get("type")
    names = types if isinstance(types, list) else [types]
    return LARGEST_INTEGER if "integer" in names and "number" not in names else LARGEST


def beyond(schema: Mapping[str, Any]) -> str:
    """Return the keyword of a bound that no number meets; empty for none."""
    end = largest_of(schema)
    for (bound, exclusive), sign in ((_LOWER, 1), (_UPPER, -1)):
        if is_number(least := schema.get(bound)) and least * sign > end:
            return bound
        if is_number(least := schema.get(exclusive)) and least * sign >= end:
            return exclusive
    return ""


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value of JSON is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _include(fields: dict[str, Any], bound: str, exclusive: str, sign: int) -> None:
    """Bound integers beyond those of a double by a double that they may be themselves."""
    for keyword, step in ((bound, 0), (exclusive, 1)):
        value = fields.get(keyword)
        if not is_number(value) or not LARGEST <= abs(value) <= LARGEST_INTEGER:
            continue
        del fields[keyword]
        least = int(value) * sign + step
        nearest = int(float(least))
        if nearest < least:
            nearest = int(math.nextafter(float(least), math.inf))
        known = fields.get(bound, nearest * sign) * sign
        fields[bound] = max(nearest, known) * sign
