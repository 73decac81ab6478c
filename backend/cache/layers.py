"""The cache classes of mlx-lm and mlx-vlm: a row with all that is to be known of each.

Nothing else knows their names. Classes are matched exactly: a subclass may keep its data elsewhere.
mlx-vlm 0.7 has its own classes, with the names and almost the internals of mlx-lm's.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import mlx.core as mx
from mlx.utils import tree_flatten

from backend.cache.kv import (
    ALLOCATION_STEP_TOKENS,
    UNPACKED,
    Arrays,
    Packing,
    Part,
    RowKV,
    State,
    copied,
)

# An object of mlx-lm or mlx-vlm, which are untyped.
UpstreamCache: TypeAlias = Any

_UPSTREAM_MODULES = ("mlx_lm.models.cache", "mlx_vlm.models.cache")
# A layer of several caches.
_LIST = "CacheList"
# Axes of positions that are the same in all directions.
_FLAT = 2


@dataclass(frozen=True, slots=True)
class PositionLayer:
    """KV of every position; can be cut anywhere.

    Attributes:
        has_room: Whether its arrays may be longer than their content.
    """

    read: Callable[[UpstreamCache], Arrays]
    write: Callable[[UpstreamCache, Arrays], None]
    packing: Packing = UNPACKED
    has_room: bool = True

    def slices(self, cache: UpstreamCache, start: int, stop: int) -> Arrays:
        """Lazily copy positions; empty for a layer that does not use its cache."""
        if cache.empty():
            return ()
        return self.packing.pack(copied(self.read(cache), start, stop))

    def restore(
        self, cache: UpstreamCache, parts: Sequence[Arrays], length: int, capacity: int
    ) -> None:
        """Fill a fresh cache.

        Args:
            parts: Arrays of consecutive positions from the first on.
            length: Their number of positions.
            capacity: The number of positions that the cache will hold.
        """
        steps = capacity // ALLOCATION_STEP_TOKENS + 1
        spare = steps * ALLOCATION_STEP_TOKENS - length if self.has_room else 0
        if columns := list(zip(*map(self.packing.unpack, parts), strict=True)):
            self.write(cache, tuple(_with_room(column, spare) for column in columns))
            cache.offset = length


@dataclass(frozen=True, slots=True)
class ReferenceLayer:
    """KV of every position; the first ones may be used in place, in the store."""

    def slices(self, cache: RowKV, start: int, stop: int) -> Arrays:
        """Lazily copy positions; empty for a layer that does not use its cache."""
        return () if cache.empty() else cache.slices(start, stop)

    def restore(self, cache: RowKV, parts: Sequence[Part], owned: Sequence[Arrays]) -> None:
        """Fill a fresh cache.

        Args:
            parts: The first positions, used in place.
            owned: Arrays of the positions after them, which are copied.
        """
        if columns := list(zip(*owned, strict=True)):
            spare = ALLOCATION_STEP_TOKENS
            cache.keys, cache.values = (_with_room(column, spare) for column in columns)
            cache.tail = cache.keys.shape[-2] - spare
        cache.parts = tuple(part for part in parts if part.arrays)


@dataclass(frozen=True, slots=True)
class WindowLayer:
    """KV of the latest positions in a ring; can be cut where the preceding window is known.

    Attributes:
        size: Positions that a token attends to, including itself.
    """

    size: int
    packing: Packing = UNPACKED

    def known_from(self, cache: UpstreamCache) -> int:
        """Return the first position that the ring still holds."""
        if cache.empty():
            return 0
        return int(cache.offset - _in_order(cache)[0].shape[-2])

    def slices(self, cache: UpstreamCache, start: int, stop: int) -> Arrays:
        """Lazily copy positions; empty for a layer that does not use its cache."""
        if cache.empty():
            return ()
        arrays = _in_order(cache)
        first = cache.offset - arrays[0].shape[-2]
        return self.packing.pack(copied(arrays, start - first, stop - first))

    def restore(self, cache: UpstreamCache, parts: Sequence[Arrays], length: int) -> None:
        """Fill a fresh cache.

        Args:
            parts: Arrays of consecutive positions up to the last; positions before the window
                are dropped.
            length: The last position plus one.
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
        """Join positions into a ring, with zeros for missing ones.

        The oldest may be missing: it is overwritten before a token can attend to it.
        """
        latest = mx.concatenate(column, axis=-2)[..., -self.size :, :]
        missing = min(self.size, length) - latest.shape[-2]
        if missing > 0:
            latest = mx.concatenate([_zeros(latest, missing), latest], axis=-2)
        return mx.contiguous(latest)


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A state at one position, copied as a whole."""

    read: Callable[[UpstreamCache], State]
    write: Callable[[UpstreamCache, State], None]

    def snapshot(self, cache: UpstreamCache) -> State:
        """Lazily copy the state."""
        state = self.read(cache)
        return State(
            tuple(None if a is None else mx.contiguous(a) for a in state.arrays), state.numbers
        )

    def restore(self, cache: UpstreamCache, state: State) -> None:
        """Fill a fresh cache."""
        # Caches assign to slices of their arrays, which must not be the store's objects.
        arrays = tuple(copy.copy(array) for array in state.arrays)
        self.write(cache, State(arrays, state.numbers))


@dataclass(frozen=True, slots=True)
class CounterLayer:
    """A count of positions, which is not stored."""

    def restore(self, cache: UpstreamCache, length: int) -> None:
        """Let a fresh counter continue after `length` tokens of text."""
        cache.upcoming = [length]


@dataclass(frozen=True, slots=True)
class DerivedLayer:
    """A cache that is not stored: the network makes it anew from its other caches."""


LayerKind: TypeAlias = (
    PositionLayer | ReferenceLayer | WindowLayer | StateLayer | CounterLayer | DerivedLayer
)


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory of one layer's cache.

    Attributes:
        bytes_per_token: Bytes per position; 0 for a state of fixed size.
        window: Maximum number of positions; 0 for all.
        fixed_bytes: Bytes of a state, whatever the length of the sequence.
    """

    bytes_per_token: int = 0
    window: int = 0
    fixed_bytes: int = 0


Seen: TypeAlias = tuple[mx.array, mx.array, mx.array | None]
"""Keys and values [B, heads, positions, width], and a mask of them."""


GoBack: TypeAlias = Callable[[Sequence[int]], None]
"""Takes how many tokens of the latest pass each row keeps."""


class Form(Enum):
    """How a cache of every position has its keys and values, in `keys` and `values`."""

    PLAIN = "plain"
    QUANTISED = "quantised"


def _grow_by_attributes(cache: UpstreamCache) -> Growth:
    """Return the growth of a cache by the attributes that upstream's classes have."""
    if not isinstance(getattr(cache, "keys", None), mx.array):
        return Growth(fixed_bytes=cache_bytes(cache))
    bytes_per_token = _bytes_per_position((cache.keys, cache.values))
    if chunk := getattr(cache, "chunk_size", 0):
        # `chunk_size` bounds the visible positions; allocation goes beyond it by up to a step.
        return Growth(bytes_per_token, int(chunk) + ALLOCATION_STEP_TOKENS)
    return Growth(bytes_per_token, int(getattr(cache, "max_size", 0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheClass:
    """All that is to be known of a class of caches, of one row or of a batch of rows.

    Attributes:
        kind: Returns how a fresh cache is cut, stored and restored: at any position, where its
            window is known, or as a state; `None` if it is not. A model with such a cache has no
            prompt cache.
        growth: Returns the memory growth of a cache that holds a few tokens.
        give_back: Drops the latest positions of each row, all from the latest pass; `None` if
            the cache cannot.
        keeps_positions: Whether every position is kept, so that any number can be given back.
        remember: Takes down a state before a pass. The returned function puts it back for each row
            that keeps 0 of the tokens it took; a row keeps all or none. `None` without a state.
        form: Its keys and values, if rows in a batch may keep their own lengths; `None` leaves
            batches to its own `merge`.
        quantises: Tells whether a fresh one can be exchanged for a quantised one.
        refers: Whether a `RowKV` can take its place, which uses the prompt cache in place.
        pair: Returns the keys and values of every position, dequantised.
        latest: Returns the keys and values that the latest position of each row sees, and a mask
            [B, 1, 1, positions] of them if not all; `None` if they are kept in another form.
        order: Puts a batch in order before a pass of several tokens, whose mask requires it.
    """

    kind: Callable[[UpstreamCache, Packing], LayerKind | None] = lambda *_: None
    growth: Callable[[UpstreamCache], Growth] = _grow_by_attributes
    give_back: Callable[[UpstreamCache, Sequence[int]], None] | None = None
    keeps_positions: bool = False
    remember: Callable[[UpstreamCache], GoBack] | None = None
    form: Form | None = None
    quantises: Callable[[UpstreamCache], bool] = lambda _: False
    refers: bool = False
    pair: Callable[[UpstreamCache], Arrays] | None = None
    latest: Callable[[UpstreamCache], Seen] | None = None
    order: Callable[[UpstreamCache], None] | None = None


def class_of(cache: UpstreamCache) -> CacheClass:
    """Return the abilities of a cache's class; an unknown class has none."""
    if isinstance(cache, RowKV):
        return _ROW
    kind = type(cache)
    is_shared = kind.__module__ in _UPSTREAM_MODULES
    name = kind.__name__ if is_shared else f"{kind.__module__}.{kind.__name__}"
    if known := CACHE_CLASSES.get(name):
        return known
    if getattr(cache, "is_derived", False):
        return _DERIVED
    return _COUNTER if getattr(cache, "counts_only", False) else _UNKNOWN


def cache_leaves(caches: Iterable[UpstreamCache]) -> Iterator[UpstreamCache]:
    """Yield the caches that hold arrays, in a fixed order; a `CacheList` holds other caches."""
    for cache in caches:
        if _is_list(cache):
            yield from cache_leaves(cache.caches)
        else:
            yield cache


def with_leaves(make: Callable[..., UpstreamCache], *caches: UpstreamCache) -> UpstreamCache:
    """Apply `make` to caches of one layer, leaf by leaf, in a `CacheList` like theirs."""
    if not _is_list(caches[0]):
        return make(*caches)
    columns = zip(*(cache.caches for cache in caches), strict=True)
    return type(caches[0])(*(with_leaves(make, *column) for column in columns))


def _is_list(cache: UpstreamCache) -> bool:
    kind = type(cache)
    return kind.__name__ == _LIST and kind.__module__ in _UPSTREAM_MODULES


def is_empty(cache: UpstreamCache) -> bool:
    """Tell whether a layer's cache is empty; one without `empty` counts as not empty."""
    return bool(cache.empty()) if hasattr(cache, "empty") else False


def cache_bytes(cache: UpstreamCache) -> int:
    """Return the bytes of a layer's cache; those of some models have a state but no `nbytes`."""
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes)
    arrays = (array for _, array in tree_flatten(list(cache.state)))
    return sum(array.nbytes for array in arrays if isinstance(array, mx.array))


def in_pieces(caches: Iterable[UpstreamCache], piece_bytes: int) -> Iterator[list[Any]]:
    """Yield the states of caches, so that no command of the device need compute much more at once.

    Args:
        piece_bytes: A piece ends with the layer that reaches this size.
    """
    due: list[Any] = []
    size = 0
    for leaf in cache_leaves(caches):
        due.append(leaf.state)
        size += cache_bytes(leaf)
        if size >= piece_bytes:
            yield due
            due, size = [], 0
    if due:
        yield due


def growth_of(cache: UpstreamCache) -> Growth:
    """Return the memory growth of a layer's cache, given one that holds a few tokens."""
    if is_empty(cache):
        return Growth(fixed_bytes=cache_bytes(cache))
    return class_of(cache).growth(cache)


def _bytes_per_position(arrays: Iterable[mx.array]) -> int:
    return sum(array.nbytes // array.shape[-2] for array in arrays)


def _read_pair(cache: UpstreamCache) -> Arrays:
    return cache.keys, cache.values


def _write_pair(cache: UpstreamCache, arrays: Arrays) -> None:
    cache.keys, cache.values = arrays


def _read_quantized(cache: UpstreamCache) -> Arrays:
    return (*cache.keys, *cache.values)


def _write_quantized(cache: UpstreamCache, arrays: Arrays) -> None:
    half = len(arrays) // 2
    cache.keys, cache.values = arrays[:half], arrays[half:]


def _read_indexed(cache: UpstreamCache) -> Arrays:
    """Return keys, values, and the keys and positions of an indexer, [..., tokens, width]."""
    positions = cache.index_position_ids
    places = positions.swapaxes(-1, -2) if positions.ndim > _FLAT else positions[..., None]
    return cache.keys, cache.values, cache.index_keys, places


def _write_indexed(cache: UpstreamCache, arrays: Arrays) -> None:
    cache.keys, cache.values, cache.index_keys, places = arrays
    has_axes = places.shape[0] > 1
    cache.index_position_ids = places.swapaxes(-1, -2) if has_axes else places[..., 0]


def _write_arrays(cache: UpstreamCache, state: State) -> None:
    cache.cache = list(state.arrays)


def _read_chunk(cache: UpstreamCache) -> State:
    kept = cache.offset - cache.start_position
    arrays = () if cache.empty() else copied((cache.keys, cache.values), 0, kept)
    return State(arrays, (cache.offset, cache.start_position))


def _write_chunk(cache: UpstreamCache, state: State) -> None:
    if state.arrays:
        cache.keys, cache.values = state.arrays
    cache.offset, cache.start_position = state.numbers


def _dequantised(cache: UpstreamCache) -> Arrays:
    options = {"group_size": cache.group_size, "bits": cache.bits}
    return mx.dequantize(*cache.keys, **options), mx.dequantize(*cache.values, **options)


def _positions(
    read: Callable[[UpstreamCache], Arrays],
) -> Callable[[UpstreamCache], Growth]:
    return lambda cache: Growth(_bytes_per_position(read(cache)))


def _trim(cache: UpstreamCache, counts: Sequence[int]) -> None:
    (count,) = counts
    cache.trim(count)


def _roll(cache: UpstreamCache, counts: Sequence[int]) -> None:
    cache.prepare(right_padding=list(counts))
    cache.finalize()
    keys = getattr(cache, "keys", None)
    if keys is not None and keys.dtype == mx.bool_:
        # Flags of positions, which upstream searches for the first: none may come round before it.
        is_padding = mx.arange(keys.shape[2]) < cache.left_padding[:, None]
        cache.keys = keys & ~is_padding[:, None, :, None]


def _shorten(cache: UpstreamCache, counts: Sequence[int]) -> None:
    """Shorten the window of a row after a pass of several tokens, which are in order."""
    (count,) = counts
    if count:
        cache.keys = cache.keys[..., : cache.keys.shape[2] - count, :]
        cache.values = cache.values[..., : cache.values.shape[2] - count, :]
        cache.offset -= count
        cache._idx = cache.keys.shape[2]  # noqa: SLF001 (it has no public name)


def _roll_window(cache: UpstreamCache, counts: Sequence[int]) -> None:
    cache.prepare(lengths=[-count for count in counts], right_padding=list(counts))
    cache.finalize()


def _latest_positions(cache: UpstreamCache) -> Seen:
    stop = cache.offset
    return cache.keys[..., :stop, :], cache.values[..., :stop, :], None


def _latest_window(cache: UpstreamCache) -> Seen:
    """Return the window of a row; attention does not depend on the order of a full ring."""
    keys, values = _in_order(cache)
    return keys[..., -cache.max_size :, :], values[..., -cache.max_size :, :], None


def _latest_padded(cache: UpstreamCache) -> Seen:
    stop = cache._idx  # noqa: SLF001 (it has no public name)
    mask = mx.arange(stop) >= cache.left_padding[:, None, None, None]
    return cache.keys[..., :stop, :], cache.values[..., :stop, :], mask


def _latest_windows(cache: UpstreamCache) -> Seen:
    """Return the windows of rows in rings of the same order, padded before their first tokens."""
    # More places than positions are spare.
    count = min(cache._offset, cache.keys.shape[-2])  # noqa: SLF001 (it has no public name)
    # The age order of the places: a ring begins after the place written last.
    order = mx.arange(count)
    if cache.rotated:
        order = (order - cache._idx) % count  # noqa: SLF001 (it has no public name)
    first = mx.maximum(cache.left_padding, count - cache.max_size)
    mask = order >= first[:, None, None, None]
    return cache.keys[..., :count, :], cache.values[..., :count, :], mask


def _order_window(cache: UpstreamCache) -> None:
    cache._temporal_order()  # noqa: SLF001 (upstream orders them after the mask is made)


def _count_back(cache: UpstreamCache, counts: Sequence[int]) -> None:
    cache.upcoming = [place - n for place, n in zip(cache.upcoming, counts, strict=True)]


def _remember_arrays(cache: UpstreamCache) -> GoBack:
    before = list(cache.cache)

    def go_back(kept: Sequence[int]) -> None:
        if not all(kept):
            cache.cache = _chosen(kept, cache.cache, before)

    return go_back


_POOL_ARRAYS = ("buf_kv", "buf_gate")


def _remember_pools(cache: UpstreamCache) -> GoBack:
    before = {name: copy.copy(getattr(cache, name)) for name in (*_POOL_ARRAYS, "pooled")}
    remainder = cache.remainder

    def go_back(kept: Sequence[int]) -> None:
        if not all(kept):
            for name, array in before.items():
                setattr(cache, name, array)
            cache.remainder = remainder

    return go_back


_POOL_NUMBERS = ("remainder", "_pool_lengths", "_processed")


def _remember_pools_of_rows(cache: UpstreamCache) -> GoBack:
    """Return the way back for the rows of a batch; pools beyond a row's own number do not count."""
    arrays = [copy.copy(getattr(cache, name)) for name in _POOL_ARRAYS]
    numbers = {name: list(getattr(cache, name)) for name in _POOL_NUMBERS}

    def go_back(kept: Sequence[int]) -> None:
        if all(kept):
            return
        after = [getattr(cache, name) for name in _POOL_ARRAYS]
        if arrays[0] is not None:
            cache.buf_kv, cache.buf_gate = _chosen(kept, after, arrays)
        for name, before in numbers.items():
            columns = zip(kept, getattr(cache, name), before, strict=True)
            setattr(cache, name, [new if n else old for n, new, old in columns])

    return go_back


def _chosen(
    kept: Sequence[int], after: Sequence[mx.array | None], before: Sequence[mx.array | None]
) -> list[mx.array | None]:
    """Return the arrays of a state, with the earlier ones for rows that keep nothing of a pass."""
    keeps = mx.array([n > 0 for n in kept])

    def choose(new: mx.array | None, old: mx.array | None) -> mx.array | None:
        if new is None or old is None or not any(kept):
            return old
        return mx.where(keeps.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return [choose(new, old) for new, old in zip(after, before, strict=True)]


def _row_layer(_cache: UpstreamCache, packing: Packing) -> LayerKind:
    is_packed = packing.bits is not None
    return PositionLayer(RowKV.joined, _write_pair, packing) if is_packed else ReferenceLayer()


def _window_layer(cache: UpstreamCache, packing: Packing) -> LayerKind | None:
    return WindowLayer(cache.max_size, packing) if cache.keep == 0 else None


def _state_of(
    arrays: Sequence[str], numbers: Sequence[str]
) -> Callable[[UpstreamCache, Packing], LayerKind]:
    """Return the kind of a cache whose state is in these attributes."""

    def read(cache: UpstreamCache) -> State:
        found = (tuple(getattr(cache, name) for name in names) for names in (arrays, numbers))
        return State(*found)

    def write(cache: UpstreamCache, state: State) -> None:
        values = (*state.arrays, *state.numbers)
        for name, value in zip((*arrays, *numbers), values, strict=True):
            setattr(cache, name, value)

    return lambda *_: StateLayer(read, write)


def _grow_with_pools(cache: UpstreamCache) -> Growth:
    """Return the growth of a cache that keeps one pool for `ratio` tokens."""
    return Growth(math.ceil(cache.buf_kv.nbytes / cache.ratio**2), fixed_bytes=cache_bytes(cache))


def _grow_with_groups(cache: UpstreamCache) -> Growth:
    """Return the growth of a cache of a window and compressed groups."""
    groups = [array for array in (cache.compress_kv, cache.index_k) if array is not None]
    grown = sum(array.nbytes for array in groups)
    return Growth(math.ceil(grown / cache.offset), fixed_bytes=cache_bytes(cache) - grown)


_UNKNOWN = CacheClass()
_COUNTER = CacheClass(kind=lambda *_: CounterLayer(), give_back=_count_back)
_DERIVED = CacheClass(
    kind=lambda *_: DerivedLayer(),
    give_back=lambda cache, counts: cache.trim(max(counts)),
    keeps_positions=True,
)
_ROW = CacheClass(
    kind=_row_layer,
    growth=_positions(RowKV.joined),
    give_back=_trim,
    keeps_positions=True,
    form=Form.PLAIN,
)
CACHE_CLASSES: dict[str, CacheClass] = {
    "KVCache": CacheClass(
        kind=lambda _cache, packing: PositionLayer(_read_pair, _write_pair, packing),
        growth=_positions(_read_pair),
        give_back=_trim,
        keeps_positions=True,
        form=Form.PLAIN,
        quantises=lambda cache: not _has_numbers_apart(cache),
        refers=True,
        pair=_read_pair,
        latest=_latest_positions,
    ),
    "QuantizedKVCache": CacheClass(
        kind=lambda *_: PositionLayer(_read_quantized, _write_quantized),
        growth=_positions(_read_quantized),
        give_back=_trim,
        keeps_positions=True,
        form=Form.QUANTISED,
        pair=_dequantised,
    ),
    "RotatingKVCache": CacheClass(kind=_window_layer, give_back=_shorten, latest=_latest_window),
    "ChunkedKVCache": CacheClass(kind=lambda *_: StateLayer(_read_chunk, _write_chunk)),
    "ArraysCache": CacheClass(
        kind=lambda *_: StateLayer(lambda cache: State(tuple(cache.cache)), _write_arrays),
        remember=_remember_arrays,
    ),
    "PoolingCache": CacheClass(
        kind=_state_of(("buf_kv", "buf_gate", "pooled"), ("remainder",)),
        growth=_grow_with_pools,
        remember=_remember_pools,
    ),
    "BatchPoolingCache": CacheClass(remember=_remember_pools_of_rows),
    "mlx_lm.models.deepseek_v41.LayerCache": CacheClass(
        kind=_state_of(
            ("window", "compress_kv", "index_k", "pending_kv", "pending_gate"), ("offset",)
        ),
        growth=_grow_with_groups,
    ),
    "mlx_vlm.models.qwen4_exp.language.QSAKVCache": CacheClass(
        kind=lambda _cache, packing: PositionLayer(
            _read_indexed, _write_indexed, packing, has_room=False
        ),
        growth=_positions(_read_indexed),
        give_back=_trim,
        keeps_positions=True,
    ),
    "mlx_vlm.models.z1t.language.Z1TCache": CacheClass(
        kind=_state_of(("cum_eKV", "cum_eK", "win_eKV", "win_eK"), ("offset",))
    ),
    "BatchKVCache": CacheClass(give_back=_roll, keeps_positions=True, latest=_latest_padded),
    "BatchRotatingKVCache": CacheClass(
        give_back=_roll_window, order=_order_window, latest=_latest_windows
    ),
}
"""Upstream's classes, by their exact names; with the modules of those that only a family has."""


def _has_numbers_apart(cache: UpstreamCache) -> bool:
    """Tell whether a cache is mlx-vlm's, whose `state` contains only arrays."""
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


def _with_room(column: Sequence[mx.array], spare: int) -> mx.array:
    return mx.concatenate([*column, _zeros(column[0], spare)], axis=-2)


def _zeros(like: mx.array, tokens: int) -> mx.array:
    shape = list(like.shape)
    shape[-2] = tokens
    return mx.zeros(shape, like.dtype)
