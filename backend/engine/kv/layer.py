"""The keys and values of one layer for all rows of a batch, each row with its own length.

A model uses a `RaggedKV` as upstream's cache. The keys and values that it fetches are the
`RaggedKV` itself, which it passes to upstream's attention. All families of mlx-lm and mlx-vlm, and
the drafters of mlx-vlm, compute that with `scaled_dot_product_attention` of a module `base`, which
their modules import by name: `install` replaces it, in `base` and in every imported module, with a
function that comes back here.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, wraps
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention
from mlx_lm.models.cache import QuantizedKVCache

from backend.cache.kv import Part, RowKV
from backend.cache.layers import UpstreamCache, class_of
from backend.engine.kv.ledger import Ledger, Recipe, Takeover
from backend.engine.kv.spans import Group, Pass, Span, WideRow
from backend.model.checkpoint.upstream import reroute
from backend.model.device import DEVICE, Pieces


class Partial(NamedTuple):
    """The contribution of some keys to the attention of rows.

    Attributes:
        output: [rows, heads, width, value width], float32: values weighted by `exp(score - top)`.
        top: [rows, heads, width, 1], the largest score.
        total: [rows, heads, width, 1], the sum of the weights.
    """

    output: mx.array
    top: mx.array
    total: mx.array

    def spread(self, places: mx.array) -> "Partial":
        """Return it for more rows, indexed by `places`; one after the last is a row without."""
        blanks = zip(self, (0.0, -mx.inf, 0.0), strict=True)
        return Partial(*(_with_blank(part, blank)[places] for part, blank in blanks))


def over_some(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
) -> Partial:
    """Attend to keys [rows, ...], each row's own, or [1, ...], those of all rows."""
    if found := DEVICE.attend_part(queries, keys, values, scale, mask):
        return Partial(*found)
    over = over_own if len(keys) == len(queries) else over_shared
    return over(queries, keys, values, scale, mask)


def over_shared(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
) -> Partial:
    """Attend to keys shared by all rows, which are read once.

    Args:
        queries: [rows, heads, width, head width].
        keys: [1, kv heads, positions, head width].
        values: [1, kv heads, positions, value width].
        mask: [rows, 1, width or 1, positions], the visible positions; `None` is all.
    """
    rows, heads, width, _ = queries.shape
    kv_heads = keys.shape[1]
    stacked = (queries * scale).reshape(rows, kv_heads, -1, queries.shape[-1]).swapaxes(0, 1)
    flat = stacked.reshape(kv_heads, -1, queries.shape[-1])
    # An index instead of `squeeze` would copy them.
    scores = flat @ keys.squeeze(0).swapaxes(-1, -2)
    if mask is not None:
        by_row = scores.reshape(kv_heads, rows, heads // kv_heads, width, -1)
        scores = mx.where(mask[None], by_row, -mx.inf).reshape(scores.shape)
    weights, top, total = _weights(scores)
    output = weights.astype(values.dtype) @ values.squeeze(0)
    return Partial(*(_by_row(a, rows, heads, width) for a in (output, top, total)))


def over_own(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
) -> Partial:
    """Attend to each row's own keys, [rows, kv heads, positions, head width]."""
    rows, heads, width, head_width = queries.shape
    kv_heads = keys.shape[1]
    flat = (queries * scale).reshape(rows, kv_heads, -1, head_width)
    scores = flat @ keys.swapaxes(-1, -2)
    if mask is not None:
        by_head = scores.reshape(rows, kv_heads, heads // kv_heads, width, -1)
        scores = mx.where(mask[:, None], by_head, -mx.inf).reshape(scores.shape)
    weights, top, total = _weights(scores)
    output = (weights.astype(values.dtype) @ values).astype(mx.float32)
    shape = (rows, heads, width, -1)
    return Partial(*(part.reshape(shape) for part in (output, top, total)))


def merged(partials: Sequence[Partial], sinks: mx.array | None, dtype: mx.Dtype) -> mx.array:
    """Return the attention [rows, heads, width, value width] over all keys.

    Args:
        partials: Of the same rows; each row sees a key in at least one of them.
        sinks: [heads] scores of an empty position.
    """
    if len(partials) == 1 and sinks is None:
        return (partials[0].output / partials[0].total).astype(dtype)
    top = mx.max(mx.stack([partial.top for partial in partials]), axis=0)
    total = mx.zeros_like(top)
    if sinks is not None:
        scores = sinks.astype(mx.float32)[:, None, None]
        top = mx.maximum(top, scores)
        total = total + mx.exp(scores - top)
    output = mx.zeros_like(partials[0].output)
    for partial in partials:
        weight = mx.exp(partial.top - top)
        output = output + weight * partial.output
        total = total + weight * partial.total
    return (output / total).astype(dtype)


def over_pieces(
    queries: mx.array,
    pieces: Sequence[tuple[int, Sequence[mx.array]]],
    scale: float,
    visible: Callable[[int, int], mx.array | None],
    sinks: mx.array | None,
) -> mx.array:
    """Return the attention [1, heads, width, value width] of one row over keys in pieces.

    Args:
        queries: [1, heads, width, head width].
        pieces: For each in order, the number of its positions, its keys and its values.
        visible: Returns the visible ones of some positions, as `over_some` takes them.
        sinks: [heads] scores of an empty position.
    """
    partials, start = [], 0
    for tokens, (keys, values) in pieces:
        mask = visible(start, start + tokens)
        partials.append(over_some(queries, keys, values, scale, mask))
        start += tokens
    return merged(partials, sinks, queries.dtype)


def joined(partials: Sequence[Partial]) -> Partial:
    """Concatenate the rows of several partials."""
    if len(partials) == 1:
        return partials[0]
    return Partial(*map(mx.concatenate, zip(*partials, strict=True)))


def _weights(scores: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Return the weights of scores [..., positions], the largest score and the sum, in float32."""
    scores = scores.astype(mx.float32)
    top = scores.max(axis=-1, keepdims=True)
    # A query that sees none of these keys has no largest score.
    weights = DEVICE.exp(scores - mx.where(mx.isinf(top), 0.0, top))
    return weights, top, weights.sum(axis=-1, keepdims=True)


def _by_row(array: mx.array, rows: int, heads: int, width: int) -> mx.array:
    """Turn [kv heads, rows * repeats * width, n] into [rows, heads, width, n]."""
    kv_heads = array.shape[0]
    by_row = array.astype(mx.float32).reshape(kv_heads, rows, -1, array.shape[-1]).swapaxes(0, 1)
    return by_row.reshape(rows, heads, width, -1)


def _with_blank(array: mx.array, value: float) -> mx.array:
    return mx.concatenate([array, mx.full((1, *array.shape[1:]), value, array.dtype)])


Buffers: TypeAlias = tuple[mx.array, ...]
"""Arrays [rows, heads, capacity, width] of one group: keys and values, maybe in several parts."""

POSITIONS = 2
"""Their axis of positions."""


def taken(
    source: Takeover, old: Mapping[Group, Buffers], joining: Sequence[Buffers | None], like: Buffers
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


_Mask: TypeAlias = mx.array | str | None


class _Terms(NamedTuple):
    """How a pass attends: the scale of scores, the window, and the scores of an empty position."""

    scale: float
    window: int | None
    sinks: mx.array | None


class Window:
    """A mask that hides all but the latest positions, given by the lengths of the rows."""

    def __init__(self, size: int) -> None:
        self.size = size


class RaggedKV:
    """Buffers of keys and values, one set for each group of rows.

    Each row is written at its end. Positions after its end are never read, and overwritten.
    """

    # Whether its arrays are the keys and the values, as they are.
    _is_plain = True

    def __init__(self, ledger: Ledger, like: UpstreamCache) -> None:
        """Start without rows; those that leave get a cache of the class of `like`."""
        self._ledger = ledger
        self._kind = type(like)
        self.buffers: dict[Group, Buffers] = {}
        self._references: dict[int, Buffers] = {}
        self._written: Pass | None = None

    @property
    def offset(self) -> mx.array:
        """Positions before each row of the network, including those that this layer took."""
        current = self.current
        return current.offset_after if self._written is current else current.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[object, object]:
        """Append [B, heads, width, head width] to each row, or the tokens of a packed pass."""
        current = self.current
        encoded = self._encoded(keys, values)
        firsts = tuple(map(current.first, encoded))
        for span in current.spans:
            self._write(span, tuple(array[span.take] for array in firsts))
        for row in current.wide:
            self._write_rest(row, encoded)
        self._written = current
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[object, object]:
        """Return the keys and values for other layers that share them."""
        return self, self

    def make_mask(
        self,
        N: int,  # noqa: N803, ARG002 (upstream's parameters)
        return_array: bool = False,  # noqa: FBT001, FBT002, ARG002
        window_size: int | None = None,
    ) -> Window | None:
        """Return the mask beyond the lengths of the rows, if any."""
        return None if window_size is None else Window(window_size)

    def attend(
        self, queries: mx.array, scale: float, mask: object, sinks: mx.array | None
    ) -> mx.array:
        """Return the attention [B, heads, width, value width], computed group by group.

        Args:
            queries: [B, heads, width, head width]; in a packed pass [T, heads, 1, head width],
                and the attention alike.
            mask: As `make_mask` gave it.
            sinks: [heads] scores of an empty position, for families that have one.

        Raises:
            TypeError: The model made its own mask.
        """
        if mask is not None and not isinstance(mask, Window):
            raise TypeError("the model's own mask cannot be used with rows of different length")
        current = self.current
        terms = _Terms(scale, None if mask is None else mask.size, sinks)
        first = self._attend_spans(current.first(queries), terms)
        wide = [self._attend_wide(queries, row, terms) for row in current.wide]
        return current.joined(first, wide)

    def _attend_spans(self, queries: mx.array, terms: _Terms) -> mx.array:
        """Return the attention of as many tokens of each row."""
        current = self.current
        if self._is_plain and (found := self._attend_pieces(queries, terms)) is not None:
            return found
        outputs = [self._attention(queries, span, terms) for span in current.plain]
        if current.referring:
            partials = self._partials(queries, terms)
            outputs.append(merged(partials, terms.sinks, queries.dtype))
        return current.in_order(outputs)

    def _attend_pieces(self, queries: mx.array, terms: _Terms) -> mx.array | None:
        """Return the attention of one token of each row, if the device computes it at once."""
        if self.current.width > 1 or DEVICE.attend_pieces is None:
            return None
        seen = self.current.seen
        sources = [
            self.buffers[each] if isinstance(each, Group) else self._references[each]
            for each in seen.sources
        ]
        pieces = Pieces(sources, seen.table, seen.longest, seen.is_even)
        return DEVICE.attend_pieces(
            queries, pieces, scale=terms.scale, window=terms.window, sinks=terms.sinks
        )

    def _attend_wide(self, queries: mx.array, row: WideRow, terms: _Terms) -> mx.array:
        """Return the attention [1, heads, count, value width] of a row with several tokens."""
        own, kept, end = row.queries(queries), self.seen_by(row), row.length + row.count
        if not row.path:
            mask = "causal" if terms.window is None else row.visible(0, end, terms.window)
            return self._attend(own, kept, mask, terms)
        pieces = [
            (r.tokens, [array[:, :, : r.tokens] for array in self._references[r.source]])
            for r in row.path
        ]
        first = -sum(tokens for tokens, _ in pieces)

        def visible(start: int, stop: int) -> mx.array | None:
            return row.visible(first + start, first + stop, terms.window)

        return over_pieces(own, [*pieces, (end, kept)], terms.scale, visible, terms.sinks)

    def regroup(self, recipes: Sequence[Recipe], arrivals: Sequence[UpstreamCache]) -> None:
        """Build the buffers of new groups; the others are not touched.

        Args:
            arrivals: The caches of joining rows, whose arrays are taken over.
        """
        self._keep_references(arrivals)
        old, self.buffers = self.buffers, {}
        joining = [self._read(cache) for cache in arrivals]
        known = [*old.values(), *filter(None, joining), *self._references.values()]
        for recipe in recipes:
            group = recipe.group
            if recipe.is_kept:
                pieces = [old[group]] if group in old else []
            elif known:
                pieces = [taken(source, old, joining, known[0]) for source in recipe.sources]
            else:
                pieces = []
            if pieces:
                self.buffers[group] = in_one(pieces, group)

    def extract(self, row: int) -> UpstreamCache:
        """Return a row's own cache; the only row of a group takes its buffers along."""
        cache = self._new_cache()
        group, place = self._ledger.place(row)
        length = self._ledger.lengths[row]
        path = self._ledger.paths[row]
        if path and self._references:
            cache.parts = tuple(Part(self._references[r.source], r.tokens) for r in path)
        buffers = self.buffers.get(group)
        if buffers is not None and len(group.members) > 1:
            buffers = tuple(mx.contiguous(a[place : place + 1, :, :length]) for a in buffers)
        if buffers is not None:
            self._fill(cache, buffers, length)
        return cache

    @property
    def keys(self) -> mx.array:
        """The keys of one group: a pipeline rank adds its sent data to them."""
        return next(iter(self.buffers.values()))[0]

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        group, (_, *others) = next(iter(self.buffers.items()))
        self.buffers[group] = (keys, *others)

    @property
    def shape(self) -> tuple[int, int, mx.array, int]:
        """The shape of the keys, for families that read positions from it: each row has its own."""
        rows, heads, _, width = self.keys.shape
        return rows, heads, self.offset, width

    @property
    def dtype(self) -> mx.Dtype:
        """The data type of values, to which some families convert the output of attention."""
        return self.state[-1].dtype

    def empty(self) -> bool:
        """Tell whether nothing has been written yet."""
        return not self.buffers

    @property
    def nbytes(self) -> int:
        """Size of all buffers."""
        return sum(array.nbytes for buffers in self.buffers.values() for array in buffers)

    @property
    def state(self) -> list[mx.array]:
        """All arrays."""
        return [array for buffers in self.buffers.values() for array in buffers]

    @property
    def current(self) -> Pass:
        """The pass that is being built."""
        if self._ledger.current is None:
            raise RuntimeError("a batch is computed outside of a pass")
        return self._ledger.current

    def _keep_references(self, arrivals: Sequence[UpstreamCache]) -> None:
        """Keep the arrays that rows of the batch refer to, and release the others."""
        joining = [cache.parts if isinstance(cache, RowKV) else () for cache in arrivals]
        paths = self._ledger.paths[len(self._ledger.paths) - len(arrivals) :]
        for path, parts in zip(paths, joining, strict=True):
            # A layer that a model does not use has no parts.
            for reference, part in zip(path, parts, strict=False):
                self._references[reference.source] = part.arrays
        used = {reference.source for path in self._ledger.paths for reference in path}
        self._references = {k: v for k, v in self._references.items() if k in used}

    def _partials(self, queries: mx.array, terms: _Terms) -> list[Partial]:
        """Return the partial attention of tails and references, for rows with references."""
        current, scale, window = self.current, terms.scale, terms.window
        tails = []
        for span in current.referring:
            mask = span.array_mask if window is None else span.visible(window)
            keys, values = self.seen(span)
            tails.append(over_some(queries[span.take], keys, values, scale, mask))
        partials = [joined(tails)]
        for shared in current.shared:
            arrays = self._references[shared.source]
            keys, values = (array[:, :, : shared.tokens] for array in arrays)
            mask = shared.mask if window is None else shared.visible(window, current.latest)
            partial = over_some(queries[shared.take], keys, values, scale, mask)
            partials.append(partial if shared.places is None else partial.spread(shared.places))
        return partials

    def _write(self, span: Span, new: Buffers) -> None:
        group = span.group
        buffers = self.buffers.get(group)
        if buffers is None:
            buffers = tuple(resized(array[:, :, :0], group.capacity) for array in new)
        self.buffers[group] = tuple(
            mx.put_along_axis(
                resized(buffer, group.capacity),
                mx.broadcast_to(span.places, array.shape),
                array,
                axis=POSITIONS,
            )
            for buffer, array in zip(buffers, new, strict=True)
        )

    def _write_rest(self, row: WideRow, new: Buffers) -> None:
        """Write all tokens of a wide row but the first."""
        start, stop = row.length + 1, row.length + row.count
        buffers = self.buffers[row.group]
        for buffer, array in zip(buffers, new, strict=True):
            buffer[row.place : row.place + 1, :, start:stop] = row.queries(array)[:, :, 1:]

    def seen_by(self, row: WideRow) -> Buffers:
        """Return the filled positions of the tail of a wide row."""
        stop = row.length + row.count
        buffers = self.buffers[row.group]
        return tuple(array[row.place : row.place + 1, :, :stop] for array in buffers)

    def seen(self, span: Span) -> Buffers:
        """Return the filled positions of a group."""
        return tuple(array[:, :, : span.longest] for array in self.buffers[span.group])

    def _encoded(self, keys: mx.array, values: mx.array) -> Buffers:
        """Return the stored form of keys and values."""
        return keys, values

    def _attention(self, queries: mx.array, span: Span, terms: _Terms) -> mx.array:
        """Return the attention of a group without references."""
        mask = span.mask if terms.window is None else span.visible(terms.window)
        return self._attend(queries[span.take], self.seen(span), mask, terms)

    def _attend(self, queries: mx.array, kept: Buffers, mask: _Mask, terms: _Terms) -> mx.array:
        """Return the attention of queries over stored keys and values."""
        keys, values = kept
        scale, sinks = terms.scale, terms.sinks
        return DEVICE.attend(queries, keys, values, scale=scale, mask=mask, sinks=sinks)

    def _new_cache(self) -> UpstreamCache:
        return self._kind()

    def _read(self, cache: UpstreamCache) -> Buffers | None:
        """Return a row's own arrays; `None` if it has none yet."""
        return None if cache.keys is None else (cache.keys, cache.values)

    def _fill(self, cache: UpstreamCache, buffers: Buffers, length: int) -> None:
        cache.keys, cache.values = buffers
        if isinstance(cache, RowKV):
            cache.tail = length
        else:
            cache.offset = length


# Words, scales and biases.
_PARTS = 3


class QuantizedKV(RaggedKV):
    """Quantised keys and values: words, scales and biases of each."""

    _is_plain = False

    def __init__(self, ledger: Ledger, like: UpstreamCache) -> None:
        super().__init__(ledger, like)
        self._packing = _packing_of(like)

    def _encoded(self, keys: mx.array, values: mx.array) -> Buffers:
        return (*mx.quantize(keys, **self._packing), *mx.quantize(values, **self._packing))

    def _attend(self, queries: mx.array, kept: Buffers, mask: _Mask, terms: _Terms) -> mx.array:
        if terms.sinks is not None:
            raise TypeError("quantised attention does not support sinks")
        return over_quantised(
            queries, kept[:_PARTS], kept[_PARTS:], terms.scale, mask, self._packing
        )

    def _new_cache(self) -> UpstreamCache:
        return self._kind(**self._packing)

    def _read(self, cache: UpstreamCache) -> Buffers | None:
        return None if cache.keys is None else (*cache.keys, *cache.values)

    def _fill(self, cache: UpstreamCache, buffers: Buffers, length: int) -> None:
        cache.keys, cache.values = buffers[:_PARTS], buffers[_PARTS:]
        cache.offset = length


class LatentKV(RaggedKV):
    """Compressed keys, which are also the values, together with the keys of positions (MLA).

    These families multiply the queries of positions with the keys that they fetch, and pass the
    product to attention as a mask. They fetch an identity matrix here, so that attention gets those
    queries, and can multiply them group by group. One token per row of the network: with several,
    the families decompress the fetched keys. So passes of several tokens are packed.
    """

    def keys_and_values(self) -> tuple[object, object]:
        """Return a stand-in for the compressed keys, and an identity matrix [1, 1, R, R]."""
        _, positions = next(iter(self.buffers.values()))
        return self, mx.eye(positions.shape[-1], dtype=positions.dtype)[None, None]

    def attend(
        self, queries: mx.array, scale: float, mask: object, sinks: mx.array | None
    ) -> mx.array:
        """Return the attention over compressed keys [T, heads, 1, compressed width].

        Args:
            queries: [T, heads, 1, compressed width].
            mask: The queries of positions [T, heads, 1, R], scaled.
            sinks: No family has any.
        """
        if not isinstance(mask, mx.array) or sinks is not None:
            raise TypeError("compressed keys need the queries of positions")
        current = self.current
        first = self._attend_latent(current.first(queries), current.first(mask), scale)
        wide = [
            _over_latent(
                row.queries(queries), row.queries(mask), self.seen_by(row), row.causal, scale
            )
            for row in current.wide
        ]
        return current.joined(first, wide)

    def _attend_latent(self, queries: mx.array, positional: mx.array, scale: float) -> mx.array:
        """Return the attention of one token of each row."""
        outputs = [
            _over_latent(
                queries[span.take], positional[span.take], self.seen(span), span.array_mask, scale
            )
            for span in self.current.spans
        ]
        return self.current.in_order(outputs)


class LatestKV:
    """The KV that the latest token of each row sees in a layer, for layers that append nothing.

    A model passes it to upstream's attention as keys and values.
    """

    def __init__(self, cache: UpstreamCache) -> None:
        """Look at a layer of a batch, or of a row; a ledger has begun with `begin_latest`."""
        self._cache = cache

    def attend(
        self, queries: mx.array, scale: float, _mask: object, sinks: mx.array | None
    ) -> mx.array:
        """Return the attention [B, heads, 1, value width].

        Args:
            queries: [B, heads, 1, head width].
            sinks: [heads] scores of an empty position.
        """
        cache = self._cache
        if isinstance(cache, RaggedKV):
            return cache.attend(queries, scale, None, sinks)
        if isinstance(cache, RowKV):
            return attend_row(cache, queries, scale, None, sinks)
        if (latest := class_of(cache).latest) is None:
            return _over_quantised(cache, queries, scale)
        keys, values, seen = latest(cache)
        return DEVICE.attend(queries, keys, values, scale=scale, mask=seen, sinks=sinks)


def _over_quantised(cache: UpstreamCache, queries: mx.array, scale: float) -> mx.array:
    """Return the attention over all positions of a quantised row."""
    keys, values = (
        tuple(a[..., : cache.offset, :] for a in pair) for pair in (cache.keys, cache.values)
    )
    return over_quantised(queries, keys, values, scale, None, _packing_of(cache))


def _packing_of(cache: UpstreamCache) -> Mapping[str, int]:
    return {"group_size": cache.group_size, "bits": cache.bits}


def over_quantised(
    queries: mx.array,
    keys: Buffers,
    values: Buffers,
    scale: float,
    mask: _Mask,
    packing: Mapping[str, int],
) -> mx.array:
    """Return the attention to words, scales and biases of keys and of values."""
    found = DEVICE.attend_quantised(queries, keys, values, scale, mask, packing["bits"])
    if found is not None:
        return found
    return quantized_scaled_dot_product_attention(queries, keys, values, scale, mask, **packing)


def _over_latent(
    queries: mx.array, positional: mx.array, kept: Buffers, mask: mx.array | None, scale: float
) -> mx.array:
    """Return the attention over compressed keys and keys of positions, where a mask allows it."""
    keys, positions = kept
    scores = positional @ positions.swapaxes(-1, -2)
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
    return mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=scale, mask=scores)


# Rows alternate, and each step of a row has another table.
_KNOWN_TABLES = 16

_NAME = "scaled_dot_product_attention"
_BASES = ("mlx_lm.models.base", "mlx_vlm.models.base")

Attention: TypeAlias = Callable[..., Any]

# Arrays or caches, ours or upstream's.
_Kept: TypeAlias = Any


def install() -> None:
    """Route the attention of all modules that have been imported; cheap if nothing is new."""
    reroute(_NAME, _BASES, _routed)


def _routed(upstream: Attention) -> Attention:
    @wraps(upstream)
    def attend(  # noqa: PLR0913 (upstream's parameters)
        queries: mx.array,
        keys: _Kept,
        values: _Kept,
        cache: _Kept,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        # Called in each layer of a pass: first the most frequent.
        if isinstance(keys, mx.array) and not hasattr(cache, "bits"):
            is_large = queries.size // queries.shape[-1] * keys.shape[2] >= DEVICE.attend_from
            compute = DEVICE.attend if is_large else mx.fast.scaled_dot_product_attention
            return compute(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        if isinstance(keys, RaggedKV | LatestKV):
            return keys.attend(queries, scale, mask, sinks)
        if isinstance(keys, RowKV):
            return attend_row(keys, queries, scale, mask, sinks)
        if isinstance(cache, QuantizedKVCache) and sinks is None:
            return over_quantised(queries, keys, values, scale, mask, _packing_of(cache))
        return upstream(queries, keys, values, cache, scale, mask, sinks)

    return attend


def attend_row(
    row: RowKV, queries: mx.array, scale: float, mask: mx.array | str | None, sinks: mx.array | None
) -> mx.array:
    """Return the attention [1, heads, width, value width] of a single row.

    Args:
        row: With references; its tail holds the positions of the queries.
        queries: [1, heads, width, head width].
        mask: [width, positions], for layers with a window; `None` and "causal" are the same.
        sinks: [heads] scores of an empty position.
    """
    width = queries.shape[2]
    seen = mask if isinstance(mask, mx.array) else None
    if width == 1 and seen is None and DEVICE.attend_pieces is not None:
        found = DEVICE.attend_pieces(
            queries, _pieces_of(row), scale=scale, window=None, sinks=sinks
        )
        if found is not None:
            return found
    if seen is None and width > 1:
        latest = mx.arange(row.offset - width, row.offset)[:, None]
        seen = mx.arange(row.offset) <= latest

    def visible(start: int, stop: int) -> mx.array | None:
        return None if seen is None else seen[None, None, :, start:stop]

    pieces = [(part.tokens, part.cut()) for part in row.parts]
    pieces.append((row.tail, row.tail_arrays()))
    return over_pieces(queries, pieces, scale, visible, sinks)


def _pieces_of(row: RowKV) -> Pieces:
    pieces = [(part.arrays, part.tokens) for part in row.parts]
    if row.tail and row.keys is not None and row.values is not None:
        pieces.append(((row.keys, row.values), row.tail))
    table = _table_of(*(tokens for _, tokens in pieces))
    return Pieces([arrays for arrays, _ in pieces], table, row.offset, is_even=False)


@lru_cache(maxsize=_KNOWN_TABLES)
def _table_of(*tokens: int) -> mx.array:
    """Return the table of a row, the same for all layers."""
    return mx.array([[(source, 0, count) for source, count in enumerate(tokens)]], mx.int32)
