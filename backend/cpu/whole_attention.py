"""Attention over keys that are one array, a part of the scores at a time.

Long prompts spend most of their time here, and so do rows that share a long prefix. NumPy
takes a third of MLX's time for it: its exponentials use the widest registers, and products of
blocks stay in a core's cache.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, TypeAlias, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from backend.cpu.attention_kernel import FLOAT_BITS, MOST_QUERIES, PACKED_BITS, Stored, attend
from backend.cpu.exponentials import pays
from backend.cpu.kernels import kernels
from backend.cpu.shared_work import product_threads, spread, work_threads
from backend.engine.kv.layer import merged, over_own
from backend.model.device import is_for_all_heads

# Computed at once: 1 MiB, which a core's cache holds.
PIECE_SCORES = 2**18
# From so many scores on, those of several queries, blocks are worth waiting for their inputs.
LEAST_SCORES = 2**20
LEAST_QUERIES = 16
# The rows and columns of a block of scores.
ROWS, COLUMNS = 384, 512
# Of fewer queries, so many scores are worth it. Then the scores of a tile, its positions at least
# and at most, and the number of tiles from which threads share evenly.
LEAST_TILED, LEAST_QUANTISED, LEAST_OF_KERNEL = 2**15, 2**12, 2**11
LEAST_TILE_SCORES = 2**12
TILE_SCORES, LEAST_POSITIONS, MOST_POSITIONS, TILES_PER_THREAD = 2**16, 256, 2048, 3
_CAUSAL = "causal"
_MATRIX, _ALL_AXES = 2, 4

Numbers: TypeAlias = npt.NDArray[Any]
"""Of float32."""
Flags: TypeAlias = npt.NDArray[np.bool_]
Attend: TypeAlias = Callable[[mx.array, mx.array, mx.array], mx.array]
"""Attention of queries to keys and values."""


def attend_whole(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """Return the attention, as `mx.fast.scaled_dot_product_attention` does."""
    rows, heads, width, _ = queries.shape
    scores = rows * heads * width * keys.shape[2]
    terms: dict[str, Any] = {"scale": scale, "mask": mask, "sinks": sinks}
    is_wide = width >= LEAST_QUERIES
    is_long = scores >= LEAST_SCORES if is_wide else _are_worth_tiles(queries, keys, LEAST_TILED)
    if is_long and _selects(mask) and _is_computed(queries, keys, values, sinks, mask):
        compute = partial(in_blocks if is_wide else in_tiles, **terms)
        return _with_gradient(compute, terms)(queries, keys, values)
    if not pays(scores, queries.dtype) or not _selects(mask):
        return mx.fast.scaled_dot_product_attention(queries, keys, values, **terms)
    return _in_pieces(queries, keys, values, **terms)


def _are_worth_tiles(queries: mx.array, keys: mx.array, least: int) -> bool:
    """Tell whether to compute the scores of a few queries here: fewer if the kernel does it.

    Args:
        queries: [rows, heads, width, head width].
        keys: [rows or 1, kv heads, positions, any].
        least: Scores that are worth it without the kernel.
    """
    rows, heads, width, _ = queries.shape
    key_rows, kv_heads, positions, _ = keys.shape
    scores = rows * heads * width * positions
    if scores >= least or scores < LEAST_OF_KERNEL:
        return bool(scores >= least)
    of_head = rows // key_rows * (heads // kv_heads) * width
    return bool(of_head <= MOST_QUERIES) and kernels() is not None


def attend_part(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
) -> tuple[mx.array, mx.array, mx.array] | None:
    """Attend to some of the keys that rows see, as `Device.attend_part` describes."""
    is_long = _are_worth_tiles(queries, keys, LEAST_TILED)
    if not is_long or not _is_computed(queries, keys, values, mask):
        return None
    tiles = _Tiles.of(queries, Stored.of([keys]), Stored.of([values]), scale, mask)
    weighted, top, total = tiles.partial()
    return mx.array(weighted), mx.array(top), mx.array(total)


def attend_quantised(
    queries: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    scale: float,
    mask: mx.array | str | None,
    bits: int,
) -> mx.array | None:
    """Return the attention to quantised keys, as `Device.attend_quantised` describes."""
    is_known = bits in PACKED_BITS and queries.shape[2] < LEAST_QUERIES and _selects(mask)
    is_long = _are_worth_tiles(queries, keys[0], LEAST_QUANTISED)
    scales = (*keys[1:], *values[1:])
    if not (is_known and is_long and _is_computed(queries, *scales, keys[0], values[0], mask)):
        return None
    return _attended(queries, Stored.of(keys, bits), Stored.of(values, bits), scale, mask, None)


def _is_computed(*given: mx.array | str | None) -> bool:
    """Compute arrays; false if some are of 16 bits, or if MLX only traces a function to compile."""
    arrays = [each for each in given if isinstance(each, mx.array)]
    if any(array.dtype in (mx.float16, mx.bfloat16) for array in arrays):
        return False
    try:
        mx.eval(arrays)
    except (ValueError, RuntimeError):
        return False
    return True


def _with_gradient(computed: Attend, terms: dict[str, Any]) -> Attend:
    """Return a function that MLX cannot see into, with the gradient of MLX's own."""

    def backwards(given: Any, cotangent: mx.array, _output: mx.array) -> Any:  # noqa: ANN401 (trees)
        attend = partial(mx.fast.scaled_dot_product_attention, **terms)
        return tuple(mx.vjp(attend, list(given), [cotangent])[1])

    attend = mx.custom_function(computed)
    attend.vjp(backwards)
    return cast(Attend, attend)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The arrays of a call as NumPy sees them, without a copy.

    Attributes:
        visible: [rows, 1, width, positions]; `None` is all, see `is_causal`.
        before: The number of positions before the queries, if these are the latest.
    """

    queries: Numbers
    keys: Numbers
    values: Numbers
    visible: Flags | None
    is_causal: bool
    before: int

    @classmethod
    def of(
        cls, queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None
    ) -> "_Inputs":
        """Take arrays that are computed."""
        rows, _, width, _ = queries.shape
        positions = keys.shape[2]
        visible = None
        if isinstance(mask, mx.array):
            visible = np.broadcast_to(np.asarray(mask), (rows, 1, width, positions))
        arrays = (np.asarray(queries), np.asarray(keys), np.asarray(values))
        return cls(*arrays, visible, mask == _CAUSAL, positions - width)

    def columns(self, row: int, start: int, stop: int) -> Iterator[tuple[int, int, Flags | None]]:
        """Yield the blocks of positions that some queries see, with a mask if they see a part."""
        last = self.before + stop if self.is_causal else self.keys.shape[2]
        for first in range(0, last, COLUMNS):
            end = min(first + COLUMNS, last)
            seen = self._seen(row, slice(start, stop), slice(first, end))
            if seen is None or seen.all():
                yield first, end, None
            elif seen.any():
                yield first, end, seen

    def _seen(self, row: int, queries: slice, positions: slice) -> Flags | None:
        """Return the visible ones [queries, positions]; `None` is all."""
        if self.visible is not None:
            return self.visible[row, 0, queries, positions]
        if not self.is_causal or positions.stop <= self.before + queries.start:
            return None
        own = np.arange(self.before + queries.start, self.before + queries.stop)
        return np.arange(positions.start, positions.stop) <= own[:, None]


def in_blocks(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """Return the attention of arrays that are computed, with some blocks for each thread."""
    given = _Inputs.of(queries, keys, values, mask)
    rows, heads, width, _ = given.queries.shape
    kv_heads = given.keys.shape[1]
    repeats, extra = heads // kv_heads, None if sinks is None else np.asarray(sinks, np.float32)
    output = np.empty((rows, heads, width, given.values.shape[-1]), np.float32)
    step = max(1, ROWS // repeats)
    blocks = list(product(range(rows), range(kv_heads), range(0, width, step)))

    def compute(blocks: list[tuple[int, int, int]]) -> None:
        for row, head, start in blocks:
            own, stop = slice(head * repeats, (head + 1) * repeats), min(start + step, width)
            sink = None if extra is None else extra[own]
            block = attend_block(given, (row, head), (own, start, stop), scale, sink)
            output[row, own, start:stop] = block

    count = product_threads()
    list(work_threads().map(compute, (blocks[place::count] for place in range(count))))
    return mx.array(output)


def attend_block(
    given: _Inputs,
    place: tuple[int, int],
    taken: tuple[slice, int, int],
    scale: float,
    sinks: Numbers | None,
) -> Numbers:
    """Return the attention [heads, queries, value width] of some queries of a row.

    Args:
        given: All arrays.
        place: The row, and the head of its keys.
        taken: The heads of queries, and the first and the end of these.
        scale: Of the scores.
        sinks: [heads].
    """
    (row, head), (heads, start, stop) = place, taken
    queries = given.queries[row, heads, start:stop] * np.float32(scale)
    repeats, count, _ = queries.shape
    flat = queries.reshape(repeats * count, -1)
    softmax = _Softmax(len(flat), given.values.shape[-1])
    for first, end, visible in given.columns(row, start, stop):
        scores = flat @ given.keys[row, head, first:end].T
        if visible is not None:
            by_head = scores.reshape(repeats, count, -1)
            np.copyto(by_head, np.float32(-np.inf), where=~visible)
        softmax.add(scores, given.values[row, head, first:end])
    if sinks is not None:
        softmax.add_empty(np.repeat(sinks, count)[:, None])
    return softmax.output.reshape(repeats, count, -1)


class _Softmax:
    """Values weighted by scores that arrive block by block."""

    def __init__(self, rows: int, width: int) -> None:
        self._top = np.full((rows, 1), -np.inf, np.float32)
        self._total = np.zeros((rows, 1), np.float32)
        self._weighted = np.zeros((rows, width), np.float32)

    def add(self, scores: Numbers, values: Numbers) -> None:
        """Add scores [rows, positions], which are overwritten, and values [positions, width]."""
        fading = self._raise_top(scores.max(axis=1, keepdims=True))
        scores -= self._safe_top
        weights = np.exp(scores, out=scores)
        self._total = self._total * fading + weights.sum(axis=1, keepdims=True)
        self._weighted = self._weighted * fading + weights @ values

    def add_empty(self, scores: Numbers) -> None:
        """Add scores [rows, 1] of positions without values."""
        fading = self._raise_top(scores)
        self._total = self._total * fading + np.exp(scores - self._safe_top)
        self._weighted *= fading

    @property
    def output(self) -> Numbers:
        """The result [rows, width]; not a number for a row that sees nothing."""
        with np.errstate(invalid="ignore"):
            return self._weighted / self._total

    @property
    def _safe_top(self) -> Numbers:
        """The largest score of each row; 0 if it has none."""
        return _finite(self._top)

    def _raise_top(self, scores: Numbers) -> Numbers:
        """Take up the largest scores, and return by which factor the earlier weights fade."""
        before, self._top = self._top, np.maximum(self._top, scores)
        return np.exp(before - self._safe_top)


def in_tiles(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """Return the attention of arrays that are computed, for few queries of each row."""
    return _attended(queries, Stored.of([keys]), Stored.of([values]), scale, mask, sinks)


def _attended(
    queries: mx.array,
    keys: Stored,
    values: Stored,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    width, positions = queries.shape[2], keys.shape[2]
    visible = _visible(mask, slice(0, width), slice(positions - width, positions))
    weighted, top, total = _Tiles.of(queries, keys, values, scale, visible).partial()
    if sinks is not None:
        empty = np.asarray(sinks, np.float32)[:, None, None]
        highest = np.maximum(top, empty)
        fading = np.exp(top - highest)
        weighted, total = weighted * fading, total * fading + np.exp(empty - highest)
    with np.errstate(invalid="ignore"):
        return mx.array(weighted / total)


_Place: TypeAlias = tuple[slice, slice]
"""Some rows, and some heads of keys."""


def _scores(keys: Stored, queries: Numbers, place: _Place, column: slice) -> Numbers:
    """Return the products of queries [..., N, width] and keys [..., N, positions]."""
    if keys.bits == FLOAT_BITS:
        return queries @ keys.arrays[0][place][:, :, column].swapaxes(-1, -2)
    total: Numbers | None = None
    for group, (numbers, scales, biases) in _groups(keys, place, column):
        own = queries[..., group]
        part = own @ numbers.swapaxes(-1, -2)
        part *= scales
        part += own.sum(axis=-1, keepdims=True) * biases
        total = part if total is None else total + part
    return cast(Numbers, total)


def _weighted(values: Stored, weights: Numbers, place: _Place, column: slice) -> Numbers:
    """Return the sums [..., N, width] of values weighted by [..., N, positions]."""
    if values.bits == FLOAT_BITS:
        return weights @ values.arrays[0][place][:, :, column]
    parts = [
        (weights * scales) @ numbers + (weights * biases).sum(axis=-1, keepdims=True)
        for _, (numbers, scales, biases) in _groups(values, place, column)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)


def _groups(
    stored: Stored, place: _Place, column: slice
) -> Iterator[tuple[slice, tuple[Numbers, Numbers, Numbers]]]:
    """Yield the width of each group, its integers, and its scales and biases as of scores.

    A tile is multiplied as integers; scales and biases meet the scores, which are fewer.
    """
    words, scales, biases = (each[place][:, :, column] for each in stored.arrays)
    integers = _integers(words, stored.bits)
    for n in range(scales.shape[-1]):
        group = slice(n * stored.group, (n + 1) * stored.group)
        columns = (scales[:, :, None, :, n], biases[:, :, None, :, n])
        yield group, (integers[..., group], *columns)


_HALF_BYTE, _LOW_BITS = 4, 15


def _integers(words: npt.NDArray[np.uint8], bits: int) -> Numbers:
    if bits != _HALF_BYTE:
        return words.astype(np.float32)
    numbers = np.empty((*words.shape[:-1], 2 * words.shape[-1]), np.float32)
    numbers[..., ::2] = words & _LOW_BITS
    numbers[..., 1::2] = words >> _HALF_BYTE
    return numbers


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Attention of few queries to many positions, in tiles of scores.

    Attributes:
        given: [rows, heads, width], those of the queries as they came.
        queries: [key rows, kv heads, N, head width], scaled.
        keys: [key rows, kv heads, positions, head width].
        values: [key rows, kv heads, positions, value width].
        hidden: [key rows or 1, 1, rows of each or 1, 1, width or 1, positions]; `None` is none.
    """

    given: tuple[int, int, int]
    queries: Numbers
    keys: Stored
    values: Stored
    hidden: Flags | None

    @classmethod
    def of(
        cls,
        queries: mx.array,
        keys: Stored,
        values: Stored,
        scale: float,
        mask: mx.array | None,
    ) -> "_Tiles":
        """Take arrays that are computed; the keys of one row may be those of all."""
        rows, heads, width, head_width = queries.shape
        key_rows, kv_heads = keys.shape[:2]
        shape = (key_rows, rows // key_rows, kv_heads, -1, head_width)
        scaled = np.asarray(queries).reshape(shape).swapaxes(1, 2) * np.float32(scale)
        flat = scaled.reshape(key_rows, kv_heads, -1, head_width)
        hidden = None
        if mask is not None:
            by_row = ~np.asarray(mask)[:, 0]
            owners = (1, len(by_row)) if key_rows == 1 else (len(by_row), 1)
            hidden = by_row.reshape(owners[0], 1, owners[1], 1, *by_row.shape[1:])
        return cls((rows, heads, width), flat, keys, values, hidden)

    def partial(self) -> tuple[Numbers, Numbers, Numbers]:
        """Return weighted values, the largest scores and the sums of weights, as of a `Partial`."""
        _, heads, width = self.given
        given = self.queries, self.keys, self.values, self.hidden
        found = attend(*given, repeats=heads // self.queries.shape[1], per_owner=width)
        weighted, top, total = map(self._by_row, _joined(*(found or self._in_numpy())))
        return weighted, top, total

    def _in_numpy(self) -> tuple[Numbers, Numbers, Numbers]:
        """Return the same for each column, [columns, key rows, kv heads, N, n]."""
        columns, places = self._cut()
        shape = (len(columns), *self.queries.shape[:3])
        widths = (self.values.width, 1, 1)
        weighted, top, total = (np.empty((*shape, width), np.float32) for width in widths)

        def compute(tile: tuple[int, _Place]) -> None:
            column, place = tile
            parts = self._attended(place, columns[column])
            for array, part in zip((weighted, top, total), parts, strict=True):
                array[column][place] = part

        spread(compute, list(product(range(len(columns)), places)))
        return weighted, top, total

    def _cut(self) -> tuple[list[slice], list[_Place]]:
        """Return the columns of the tiles, and their rows with heads."""
        rows, heads, queries, _ = self.queries.shape
        positions = self.keys.shape[2]
        most = min(max(TILE_SCORES // queries, LEAST_POSITIONS), MOST_POSITIONS)
        count = -(-positions // most)
        step = -(-positions // count)
        evenly = -(-rows * heads * count // (TILES_PER_THREAD * product_threads()))
        least = LEAST_TILE_SCORES // (queries * step)
        pairs = max(1, min(TILE_SCORES // (queries * step), max(evenly, least)))
        row_step, head_step = max(1, pairs // heads), min(pairs, heads)
        places = product(_slices(rows, row_step), _slices(heads, head_step))
        return _slices(positions, step), list(places)

    def _attended(self, place: _Place, column: slice) -> tuple[Numbers, Numbers, Numbers]:
        """Return the same for some rows and heads, over some positions."""
        scores = _scores(self.keys, self.queries[place], place, column)
        if self.hidden is not None:
            self._hide(scores, self.hidden[..., column], place[0])
        top = scores.max(axis=-1, keepdims=True)
        # A query that sees none of these keys has no largest score.
        scores -= top if self.hidden is None else _finite(top)
        weights = np.exp(scores, out=scores)
        weighted = _weighted(self.values, weights, place, column)
        return weighted, top, weights.sum(axis=-1, keepdims=True)

    def _hide(self, scores: Numbers, hidden: Flags, rows: slice) -> None:
        """Hide positions in scores [key rows, kv heads, N, positions]."""
        given, heads, width = self.given
        key_rows, kv_heads = self.queries.shape[:2]
        owned = (given // key_rows, heads // kv_heads, width)
        by_query = scores.reshape(*scores.shape[:2], *owned, -1)
        own = hidden if len(hidden) == 1 else hidden[rows]
        np.copyto(by_query, np.float32(-np.inf), where=own)

    def _by_row(self, array: Numbers) -> Numbers:
        """Turn [key rows, kv heads, N, n] into [rows, heads, width, n]."""
        rows, heads, width = self.given
        key_rows, kv_heads, _, last = array.shape
        by_row = array.reshape(key_rows, kv_heads, rows // key_rows, -1, last).swapaxes(1, 2)
        return by_row.reshape(rows, heads, width, last)


def _slices(count: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _finite(top: Numbers) -> Numbers:
    """Return the largest scores; 0 where there is none."""
    return np.where(np.isneginf(top), np.float32(0), top)


def _joined(weighted: Numbers, top: Numbers, total: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Join partial attention [columns, ...] over its first axis."""
    if len(top) == 1:
        return weighted[0], top[0], total[0]
    highest = top.max(axis=0)
    fading = np.exp(top - _finite(highest))
    return (weighted * fading).sum(axis=0), highest, (total * fading).sum(axis=0)


def _in_pieces(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """Return the attention, lazily, for as many queries at a time as a core's cache holds."""
    rows, heads, width, _ = queries.shape
    positions = keys.shape[2]
    step = max(1, PIECE_SCORES // (rows * heads * positions))
    outputs = []
    for start in range(0, width, step):
        stop = min(start + step, width)
        # No query of the piece sees a later position.
        seen = positions - width + stop if mask == _CAUSAL else positions
        visible = _visible(mask, slice(start, stop), slice(seen - stop + start, seen))
        part = over_own(
            queries[:, :, start:stop], keys[:, :, :seen], values[:, :, :seen], scale, visible
        )
        outputs.append(merged([part], sinks, queries.dtype))
    return mx.concatenate(outputs, axis=2)


def _selects(mask: mx.array | str | None) -> bool:
    """Tell whether a mask says for each position whether it is visible, alike for all heads."""
    if not isinstance(mask, mx.array):
        return mask in (None, _CAUSAL)
    return mask.ndim >= _MATRIX and is_for_all_heads(mask) and bool(mask.dtype == mx.bool_)


def _visible(mask: mx.array | str | None, queries: slice, latest: slice) -> mx.array | None:
    """Return the part of a mask for some queries, as `over_own` takes it.

    Args:
        mask: One that `_selects`.
        queries: Those.
        latest: Their own positions, if the mask is causal.
    """
    if mask is None:
        return None
    if not isinstance(mask, mx.array):
        return (mx.arange(latest.stop) <= mx.arange(latest.start, latest.stop)[:, None])[None, None]
    part = mask if mask.shape[-2] == 1 else mask[..., queries, :]
    return part.reshape(*[1] * (_ALL_AXES - part.ndim), *part.shape)
