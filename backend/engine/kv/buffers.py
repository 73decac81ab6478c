"""The arrays of a group of rows in one layer."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import mlx.core as mx

from backend.engine.kv.ledger import Source
from backend.engine.kv.spans import Group

Buffers: TypeAlias = tuple[mx.array, ...]
"""Arrays [rows, heads, capacity, width] of one group: keys and values, maybe in several parts."""

POSITIONS = 2
"""Their axis of positions."""


def taken(
    source: Source, old: Mapping[Group, Buffers], joining: Sequence[Buffers | None], like: Buffers
) -> Buffers:
    """Return the arrays of some rows; rows without positions have empty ones."""
    if isinstance(source.origin, int):
        found = joining[source.origin]
        count = 1
    else:
        found = old.get(source.origin)
        count = len(source.rows or source.origin.members)
    if found is None:
        return tuple(mx.zeros((count, a.shape[1], 0, a.shape[3]), a.dtype) for a in like)
    if source.rows is None:
        return found
    return tuple(array[mx.array(source.rows)] for array in found)


def in_one(pieces: Sequence[Buffers], group: Group) -> Buffers:
    """Return the arrays of a group from those of its parts, with room for its capacity."""
    if len(pieces) == 1 and pieces[0][0].shape[POSITIONS] == group.capacity:
        return pieces[0]
    columns = zip(*pieces, strict=True)
    return tuple(
        mx.concatenate([resized(array, group.capacity) for array in column]) for column in columns
    )


def resized(array: mx.array, capacity: int) -> mx.array:
    """Return an array with room for `capacity` positions; only spare positions are cut off."""
    missing = capacity - array.shape[POSITIONS]
    if missing <= 0:
        return array[:, :, :capacity] if missing else array
    spare = mx.zeros((*array.shape[:POSITIONS], missing, array.shape[3]), array.dtype)
    return mx.concatenate([array, spare], axis=POSITIONS)
