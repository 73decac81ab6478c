"""Keys and values in fewer bits: groups of them along the head width share a scale and a bias."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import mlx.core as mx

from backend.cache.kv import Arrays

GROUP_SIZES = (128, 64, 32)
DEFAULT_GROUP_SIZE = 64

_WORD_BITS = 32


def group_size_for(widths: Iterable[int], largest: int = DEFAULT_GROUP_SIZE) -> int | None:
    """Return the largest group, of at most `largest` values, that divides all widths, if any."""
    widths = tuple(widths)
    fitting = (
        size
        for size in GROUP_SIZES
        if size <= largest and all(width and width % size == 0 for width in widths)
    )
    return next(fitting, None)


@dataclass(frozen=True, slots=True)
class Packing:
    """How the store keeps arrays of floats [..., tokens, width].

    Each token is packed by itself: what is packed can be cut and joined like what is not.

    Attributes:
        bits: 4 or 8 per value; `None` keeps arrays as they are.
    """

    bits: int | None = None

    def pack(self, arrays: Arrays) -> Arrays:
        """Return, lazily, words, scales and biases in place of every array that can be packed."""
        if self.bits is None:
            return arrays
        return tuple(part for array in arrays for part in _packed(array, self.bits))

    def unpack(self, arrays: Arrays) -> Arrays:
        """Return, lazily, what was packed, in its own type."""
        return arrays if self.bits is None else tuple(_unpacked(arrays, self.bits))


UNPACKED = Packing()


def _packed(array: mx.array, bits: int) -> Arrays:
    size = group_size_for(array.shape[-1:])
    if size is None:
        return (array,)
    words, scales, biases = mx.quantize(array, group_size=size, bits=bits)
    return words, scales, biases


def _unpacked(arrays: Arrays, bits: int) -> Iterator[mx.array]:
    """Tell packed arrays by their type: keys and values are never words."""
    left = iter(arrays)
    for array in left:
        if array.dtype != mx.uint32:
            yield array
            continue
        scales, biases = next(left), next(left)
        size = array.shape[-1] * _WORD_BITS // bits // scales.shape[-1]
        yield mx.dequantize(array, scales, biases, group_size=size, bits=bits)
