"""How the cache of one layer is read and restored: a row per class of mlx-lm and mlx-vlm.

The one place, beside the batch and the factory of fresh caches, that knows their cache classes.
They are told apart by exact class: a subclass that keeps its data elsewhere must not be taken for
its parent. mlx-vlm 0.7 has classes of its own, with the names of mlx-lm's and nearly their insides.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx

from backend.cache.kv import Arrays, State
from backend.cache.packing import UNPACKED, Packing

# An object of mlx-lm or mlx-vlm, which are untyped.
UpstreamCache: TypeAlias = Any

_ALLOCATION_STEP = 256
_UPSTREAM_MODULES = ("mlx_lm.models.cache", "mlx_vlm.models.cache")


@dataclass(frozen=True, slots=True)
class PositionLayer:
    """KV of every position: it can be cut anywhere.

    Attributes:
        packing: How the store keeps it.
    """

    read: Callable[[UpstreamCache], Arrays]
    write: Callable[[UpstreamCache, Arrays], None]
    packing: Packing = UNPACKED

    def slices(self, cache: UpstreamCache, start: int, stop: int) -> Arrays:
        """Copy positions, lazily; nothing for a layer that does not use its cache."""
        if cache.empty():
            return ()
        return self.packing.pack(_cut(self.read(cache), start, stop))

    def restore(
        self, cache: UpstreamCache, parts: Sequence[Arrays], length: int, capacity: int
    ) -> None:
        """Fill a fresh cache.

        Args:
            cache: The one to fill.
            parts: Arrays of consecutive positions from the first on.
            length: How many positions they are.
            capacity: For how many the cache is going to be used.
        """
        steps = capacity // _ALLOCATION_STEP + 1
        spare = steps * _ALLOCATION_STEP - length
        if columns := list(zip(*map(self.packing.unpack, parts), strict=True)):
            self.write(cache, tuple(_with_room(column, spare) for column in columns))
            cache.offset = length


@dataclass(frozen=True, slots=True)
class WindowLayer:
    """KV of the latest positions in a ring; it can be cut where the window before is known.

    Attributes:
        size: Positions that a token sees, itself included.
        packing: How the store keeps them.
    """

    size: int
    packing: Packing = UNPACKED

    def known_from(self, cache: UpstreamCache) -> int:
        """Return the first position that the ring still holds."""
        if cache.empty():
            return 0
        return int(cache.offset - _in_order(cache)[0].shape[-2])

    def slices(self, cache: UpstreamCache, start: int, stop: int) -> Arrays:
        """Copy positions, lazily; nothing for a layer that does not use its cache."""
        if cache.empty():
            return ()
        arrays = _in_order(cache)
        first = cache.offset - arrays[0].shape[-2]
        return self.packing.pack(_cut(arrays, start - first, stop - first))

    def restore(self, cache: UpstreamCache, parts: Sequence[Arrays], length: int) -> None:
        """Fill a fresh cache.

        Args:
            cache: The one to fill.
            parts: Arrays of consecutive positions up to the last; what of them is older than
                the window is left out.
            length: The last position's number plus one.
        """
        columns = list(zip(*map(self.packing.unpack, parts), strict=True))
        if not columns:
            return
        keys, values = (self._ring(column, length) for column in columns)
        numbers = (cache.keep, cache.max_size, length, keys.shape[-2])
        if _has_numbers_apart(cache):
            cache.state, cache.meta_state = (keys, values), numbers
        else:
            keep, size, offset, index = numbers
            cache.state = keys, values, offset, keep, size, index

    def _ring(self, column: Sequence[mx.array], length: int) -> mx.array:
        """Join positions into a ring of its full size, if it should be full.

        The oldest one is overwritten before any token could see it, so it may be missing.
        """
        latest = mx.concatenate(column, axis=-2)[..., -self.size :, :]
        missing = min(self.size, length) - latest.shape[-2]
        if missing > 0:
            latest = mx.concatenate([_zeros(latest, missing), latest], axis=-2)
        return mx.contiguous(latest)


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A state that belongs to one place: it is copied whole."""

    read: Callable[[UpstreamCache], State]
    write: Callable[[UpstreamCache, State], None]

    def snapshot(self, cache: UpstreamCache) -> State:
        """Copy the state, lazily."""
        state = self.read(cache)
        return State(
            tuple(None if a is None else mx.contiguous(a) for a in state.arrays), state.numbers
        )

    def restore(self, cache: UpstreamCache, state: State) -> None:
        """Fill a fresh cache."""
        # Caches assign to slices of their arrays: the store's must be other objects.
        arrays = tuple(copy.copy(array) for array in state.arrays)
        self.write(cache, State(arrays, state.numbers))


@dataclass(frozen=True, slots=True)
class CounterLayer:
    """A count of positions: nothing of it is stored."""

    def restore(self, cache: UpstreamCache, length: int) -> None:
        """Let a fresh counter go on behind so many tokens of text."""
        cache.upcoming = [length]


LayerKind: TypeAlias = PositionLayer | WindowLayer | StateLayer | CounterLayer


def layer_kind(cache: UpstreamCache, packing: Packing) -> LayerKind | None:
    """Return how a fresh cache is read and restored; `None` for a class not known here.

    Args:
        cache: Of the layer.
        packing: How its keys and values are stored; what is quantised in use is not packed again.
    """
    match upstream_name(cache):
        case "RotatingKVCache":
            return WindowLayer(cache.max_size, packing) if cache.keep == 0 else None
        case "KVCache":
            return PositionLayer(_read_pair, _write_pair, packing)
        case "ChunkedKVCache" if _has_numbers_apart(cache):
            return None
        case "":
            return CounterLayer() if getattr(cache, "counts_only", False) else None
        case name:
            return _KINDS.get(name)


def upstream_name(cache: UpstreamCache) -> str:
    """Return the name of a cache's class, or "" for one that is not of upstream's cache modules."""
    kind = type(cache)
    return kind.__name__ if kind.__module__ in _UPSTREAM_MODULES else ""


def _read_pair(cache: UpstreamCache) -> Arrays:
    return cache.keys, cache.values


def _write_pair(cache: UpstreamCache, arrays: Arrays) -> None:
    cache.keys, cache.values = arrays


def _read_quantized(cache: UpstreamCache) -> Arrays:
    return (*cache.keys, *cache.values)


def _write_quantized(cache: UpstreamCache, arrays: Arrays) -> None:
    half = len(arrays) // 2
    cache.keys, cache.values = arrays[:half], arrays[half:]


def _write_arrays(cache: UpstreamCache, state: State) -> None:
    cache.cache = list(state.arrays)


def _read_chunk(cache: UpstreamCache) -> State:
    arrays = () if cache.empty() else cache.keys_and_values()
    return State(tuple(arrays), (cache.offset, cache.start_position))


def _write_chunk(cache: UpstreamCache, state: State) -> None:
    if state.arrays:
        cache.keys, cache.values = state.arrays
    cache.offset, cache.start_position = state.numbers


_KINDS: Mapping[str, LayerKind] = {
    "QuantizedKVCache": PositionLayer(_read_quantized, _write_quantized),
    "ArraysCache": StateLayer(lambda cache: State(tuple(cache.cache)), _write_arrays),
    "ChunkedKVCache": StateLayer(_read_chunk, _write_chunk),
}


def _has_numbers_apart(cache: UpstreamCache) -> bool:
    """Tell whether a ring is mlx-vlm's, whose state holds arrays only."""
    return bool(type(cache).__module__ == _UPSTREAM_MODULES[1])


def _in_order(cache: UpstreamCache) -> Arrays:
    """Return a ring's arrays from the oldest position to the latest."""
    if _has_numbers_apart(cache):
        keys, values = cache.keys, cache.values
        _, _, offset, index = map(int, cache.meta_state)
    else:
        keys, values, offset, _, _, index = cache.state
    if index == keys.shape[-2]:
        return keys, values
    if index < offset:
        return _rolled(keys, index), _rolled(values, index)
    return keys[..., :index, :], values[..., :index, :]


def _rolled(array: mx.array, index: int) -> mx.array:
    return mx.concatenate([array[..., index:, :], array[..., :index, :]], axis=-2)


def _cut(arrays: Iterable[mx.array], start: int, stop: int) -> Arrays:
    """Copy positions: a mere slice would keep all of the array in memory."""
    return tuple(mx.contiguous(array[..., start:stop, :]) for array in arrays)


def _with_room(column: Sequence[mx.array], spare: int) -> mx.array:
    return mx.concatenate([*column, _zeros(column[0], spare)], axis=-2)


def _zeros(like: mx.array, tokens: int) -> mx.array:
    shape = list(like.shape)
    shape[-2] = tokens
    return mx.zeros(shape, like.dtype)
