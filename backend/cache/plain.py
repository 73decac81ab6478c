"""Segments as plain buffers, the only form in which they leave the main thread."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import mlx.core as mx

from backend.cache.kv import Block, Segment, Snapshot, State


@dataclass(frozen=True, slots=True)
class PlainArray:
    """The bytes of an array, with its type and shape.

    Attributes:
        dtype: The name of an MLX data type.
        data: A contiguous buffer of bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class PlainSegment:
    """A segment without MLX.

    Attributes:
        outline: JSON that describes the structure.
        arrays: All arrays, in the order of the outline.
    """

    outline: str
    arrays: tuple[PlainArray, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.data.nbytes for array in self.arrays)

    @property
    def has_snapshot(self) -> bool:
        """Whether it has the state after its last token."""
        return json.loads(self.outline)["states"] is not None


def to_plain(segment: Segment) -> PlainSegment:
    """Return a view of a segment's arrays, which must be computed; copies nothing."""
    blocks = [
        {
            "tokens": block.tokens,
            "has_windows": block.has_windows,
            "arrays": [len(layer) for layer in block.layers],
        }
        for block in segment.blocks
    ]
    states = None
    if segment.snapshot is not None:
        states = [
            {"is_there": [a is not None for a in state.arrays], "numbers": list(state.numbers)}
            for state in segment.snapshot.states
        ]
    arrays = [a for block in segment.blocks for layer in block.layers for a in layer]
    arrays += segment.snapshot.arrays if segment.snapshot else ()
    views = [array.view(mx.uint8) for array in arrays]
    mx.eval(views)
    plain = zip(arrays, views, strict=True)
    return PlainSegment(
        json.dumps({"blocks": blocks, "states": states}),
        tuple(PlainArray(_name(a.dtype), tuple(a.shape), memoryview(view)) for a, view in plain),
    )


def from_plain(plain: PlainSegment) -> Segment:
    """Build a segment with its own arrays, not yet computed.

    Raises:
        ValueError: The arrays do not match the outline.
    """
    outline = json.loads(plain.outline)
    arrays = iter([_array(array) for array in plain.arrays])
    blocks = tuple(_block(block, arrays) for block in outline["blocks"])
    snapshot = None
    if outline["states"] is not None:
        snapshot = Snapshot(tuple(_state(state, arrays) for state in outline["states"]))
    if next(arrays, None) is not None:
        raise ValueError("there are more arrays than the outline tells of")
    return Segment(blocks, snapshot)


def _block(outline: dict[str, Any], arrays: Iterator[mx.array]) -> Block:
    layers = tuple(_take(count, arrays) for count in outline["arrays"])
    return Block(outline["tokens"], layers, outline["has_windows"])


def _state(outline: dict[str, Any], arrays: Iterator[mx.array]) -> State:
    taken = tuple(_take(1, arrays)[0] if there else None for there in outline["is_there"])
    return State(taken, tuple(outline["numbers"]))


def _take(count: int, arrays: Iterator[mx.array]) -> tuple[mx.array, ...]:
    taken = tuple(islice(arrays, count))
    if len(taken) != count:
        raise ValueError("arrays are missing")
    return taken


def _array(plain: PlainArray) -> mx.array:
    flat = mx.array(plain.data).view(getattr(mx, plain.dtype))
    return flat.reshape(plain.shape)


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
