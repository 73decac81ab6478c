"""Attention in parts: over some of the keys at a time, joined by one softmax."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from backend.model.device import DEVICE


@dataclass(frozen=True, slots=True)
class Partial:
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
        return Partial(
            _with_blank(self.output, 0.0)[places],
            _with_blank(self.top, -mx.inf)[places],
            _with_blank(self.total, 0.0)[places],
        )


def over_shared(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
) -> Partial:
    """Attend to keys shared by all rows, which are read once.

    Args:
        queries: [rows, heads, width, head width].
        keys: [1, kv heads, positions, head width].
        values: [1, kv heads, positions, value width].
        scale: Of the scores.
        mask: [rows, 1, width or 1, positions], the visible positions; `None` is all.
    """
    rows, heads, width, _ = queries.shape
    kv_heads = keys.shape[1]
    stacked = (queries * scale).reshape(rows, kv_heads, -1, queries.shape[-1]).swapaxes(0, 1)
    flat = stacked.reshape(kv_heads, -1, queries.shape[-1])
    scores = flat @ keys[0].swapaxes(-1, -2)
    if mask is not None:
        by_row = scores.reshape(kv_heads, rows, heads // kv_heads, width, -1)
        scores = mx.where(mask[None], by_row, -mx.inf).reshape(scores.shape)
    weights, top, total = _weights(scores)
    output = weights.astype(values.dtype) @ values[0]
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
        dtype: Of the result.
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
        scale: Of the scores.
        visible: Returns the visible ones of some positions, as `over_shared` takes them.
        sinks: [heads] scores of an empty position.
    """
    partials, start = [], 0
    for tokens, (keys, values) in pieces:
        mask = visible(start, start + tokens)
        partials.append(over_shared(queries, keys, values, scale, mask))
        start += tokens
    return merged(partials, sinks, queries.dtype)


def joined(partials: Sequence[Partial]) -> Partial:
    """Concatenate the rows of several partials."""
    if len(partials) == 1:
        return partials[0]
    return Partial(
        mx.concatenate([partial.output for partial in partials]),
        mx.concatenate([partial.top for partial in partials]),
        mx.concatenate([partial.total for partial in partials]),
    )


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
