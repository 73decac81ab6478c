"""Keys and values in fewer bits: groups along the head width share a scale and a bias."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import mlx.core as mx

from backend.cache.kv import Arrays

GROUP_SIZES = (128, 64, 32)
DEFAULT_GROUP_SIZE = 64

_WORD_BITS = 32


def group_size_for(widths: Iterable[int], largest: int = DEFAULT_GROUP_SIZE) -> int | None:
    """Return the largest group size, up to `largest`, that divides all widths, if any."""
    widths = tuple(widths)
    fitting = (
        size
        for size in GROUP_SIZES
        if size <= largest and all(width and width % size == 0 for width in widths)
    )
    return next(fitting, None)


@dataclass(frozen=True, slots=True)
class Packing:
    """The storage format of float arrays [..., tokens, width].

    Each token is packed separately, so packed arrays can be cut and joined like others.

    Attributes:
        bits: 4 or 8 per value; `None` leaves arrays unpacked.
    """

    bits: int | None = None

    def pack(self, arrays: Arrays) -> Arrays:
        """Lazily replace every array that can be packed by its words, scales and biases."""
        if self.bits is None:
            return arrays
        return tuple(part for array in arrays for part in _packed(array, self.bits))

    def unpack(self, arrays: Arrays) -> Arrays:
        """Lazily unpack arrays, in their original type."""
        return arrays if self.bits is None else tuple(_unpacked(arrays, self.bits))


UNPACKED = Packing()


def _packed(array: mx.array, bits: int) -> Arrays:
    size = group_size_for(array.shape[-1:])
    if size is None:
        return (array,)
    words, scales, biases = mx.quantize(array, group_size=size, bits=bits)
    return words, scales, biases


def _unpacked(arrays: Arrays, bits: int) -> Iterator[mx.array]:
    """Recognise packed arrays by their type: keys and values are never words."""
    left = iter(arrays)
    for array in left:
        if array.dtype != mx.uint32:
            yield array
            continue
        scales, biases = next(left), next(left)
        size = array.shape[-1] * _WORD_BITS // bits // scales.shape[-1]
        yield mx.dequantize(array, scales, biases, group_size=size, bits=bits)
