"""Attention of a few queries by a kernel in C, over keys and values where they lie in memory.

It writes quantised ones out as numbers, a few at a time, and takes a tenth of the time of MLX.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeAlias, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from backend.cpu.kernels import address, kernels
from backend.cpu.shared_work import spread_range

# Of a register of the kernel, in numbers.
_LANES = 8
# The positions of a tile, and those that one thread takes at least.
_TILE, CHUNK = 32, 512
# Of more queries, products of a BLAS are faster, unless it needs the numbers written out.
MOST_QUERIES = 16
FLOAT_BITS, PACKED_BITS = 32, (4, 8)

Numbers: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Stored:
    """Keys or values [rows, heads, positions, width], maybe quantised by MLX.

    Attributes:
        arrays: Numbers of float32; or words as bytes, scales and biases.
        width: Numbers of a position.
        bits: Of a number.
    """

    arrays: Sequence[Numbers]
    width: int
    bits: int = FLOAT_BITS

    @classmethod
    def of(cls, arrays: Sequence[mx.array], bits: int = FLOAT_BITS) -> Self:
        """Take an array that is computed, or its words, scales and biases."""
        numbers = [np.asarray(array) for array in arrays]
        width = numbers[0].shape[-1] * FLOAT_BITS // bits
        if bits != FLOAT_BITS:
            numbers[0] = numbers[0].view(np.uint8)
        return cls(numbers, width, bits)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers."""
        return (*self.arrays[0].shape[:3], self.width)

    @property
    def group(self) -> int:
        """Numbers that share a scale; all, if there are no scales."""
        *_, scales = self.arrays
        return self.width if self.bits == FLOAT_BITS else self.width // int(scales.shape[-1])


class _Stored(ctypes.Structure):
    """Keys or values as the kernel reads them; `numbers` to `biases` are addresses."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("numbers", "scales", "biases")),
        *((name, ctypes.c_long) for name in ("row", "head", "group_row", "group_head")),
        *((name, ctypes.c_long) for name in ("width", "bits", "group")),
    ]

    @classmethod
    def of(cls, stored: Stored) -> "_Stored":
        """Describe arrays, which must outlive it."""
        words, scales = stored.arrays[0], stored.arrays[-1]
        (row, head, *_), (group_row, group_head, *_) = words.strides, scales.strides
        addresses = [*map(address, stored.arrays), None, None][:3]
        steps = (row // 4, head // 4, group_row // 4, group_head // 4)
        return cls(*addresses, *steps, stored.width, stored.bits, stored.group)


class _Attention(ctypes.Structure):
    """A call of the kernel."""

    _fields_: ClassVar = [
        *((name, _Stored) for name in ("keys", "values")),
        *((name, ctypes.c_void_p) for name in ("queries", "hidden")),
        *((name, ctypes.c_long) for name in ("hidden_row", "hidden_owner", "hidden_query")),
        *((name, ctypes.c_long) for name in ("rows", "heads", "count", "repeats", "per_owner")),
        *((name, ctypes.c_long) for name in ("positions", "chunk", "chunks")),
        *((name, ctypes.c_void_p) for name in ("weighted", "top", "total")),
    ]


def attend(
    queries: Numbers,
    keys: Stored,
    values: Stored,
    hidden: Numbers | None,
    *,
    repeats: int,
    per_owner: int,
) -> tuple[Numbers, Numbers, Numbers] | None:
    """Attend to keys: weighted values, the largest scores and the sums of weights of a `Partial`.

    A query has the same result alone and in company.

    Args:
        queries: [rows, heads, count, width], scaled.
        hidden: [rows or 1, 1, owners or 1, 1, queries of an owner and a head or 1, positions],
            whether these do not see a position; an owner has some of the queries of each head.
        repeats: The heads of queries for each head of keys.
        per_owner: The queries of an owner in each of these.

    Returns:
        Of [chunks, rows, heads, count, value width, 1 and 1]; `None` if the kernel does not work
        here, does not know these widths, or is the slower.
    """
    is_fast = queries.shape[2] <= MOST_QUERIES or keys.bits < FLOAT_BITS
    if not (is_fast and _knows(keys) and _knows(values)) or (library := kernels()) is None:
        return None
    keys, values = _dense(keys), _dense(values)
    queries = np.ascontiguousarray(queries)
    hidden = None if hidden is None else np.ascontiguousarray(hidden)
    rows, heads, count, _ = queries.shape
    positions = keys.arrays[0].shape[2]
    chunks = -(-positions // CHUNK)
    shape = (chunks, rows, heads, count)
    found = tuple(np.empty((*shape, width), np.float32) for width in (values.width, 1, 1))
    call = _Attention(
        *map(_Stored.of, (keys, values)),
        *(address(queries), None if hidden is None else address(hidden)),
        *_steps(hidden),
        *(rows, heads, count, repeats, per_owner),
        *(positions, CHUNK, chunks),
        *(address(array) for array in found),
    )
    place, widths = ctypes.addressof(call), keys.width + values.width

    def compute(part: tuple[int, int]) -> None:
        scratch = np.empty(_TILE * widths, np.float32)
        library.attend(place, *part, address(scratch))

    products = count * widths * min(positions, CHUNK)
    spread_range(compute, (0, rows * heads * chunks), products)
    return cast(tuple[Numbers, Numbers, Numbers], found)


def _knows(stored: Stored) -> bool:
    return stored.width % _LANES == 0 and stored.group % _LANES == 0


def _dense(stored: Stored) -> Stored:
    """Return arrays whose positions follow each other; those of rows and heads need not."""
    if all(map(_is_dense, stored.arrays)):
        return stored
    arrays = [each if _is_dense(each) else np.ascontiguousarray(each) for each in stored.arrays]
    return Stored(arrays, stored.width, stored.bits)


def _is_dense(array: Numbers) -> bool:
    return bool(array.strides[2:] == (array.itemsize * array.shape[-1], array.itemsize))


def _steps(hidden: Numbers | None) -> tuple[int, ...]:
    """Return the distances of rows, owners and queries in a mask."""
    if hidden is None:
        return 0, 0, 0
    axes = (0, 2, 4)
    return tuple(0 if hidden.shape[n] == 1 else hidden.strides[n] for n in axes)
