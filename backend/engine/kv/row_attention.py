"""Attention of a single row with its first positions in the prompt cache."""

import mlx.core as mx

from backend.cache.row_kv import RowKV
from backend.engine.kv.partial import merged, over_shared


def attend_row(
    row: RowKV,
    queries: mx.array,
    scale: float,
    mask: mx.array | None,
    sinks: mx.array | None,
) -> mx.array:
    """Return the attention [1, heads, width, value width] of a single row.

    Args:
        row: With references; its tail holds the positions of the queries.
        queries: [1, heads, width, head width].
        scale: Of the scores.
        mask: [width, positions], for layers with a window; `None` is causal.
        sinks: [heads] scores of an empty position.
    """
    width = queries.shape[2]
    if mask is None and width > 1:
        latest = mx.arange(row.offset - width, row.offset)[:, None]
        mask = mx.arange(row.offset) <= latest
    partials, start = [], 0
    pieces = [(part.tokens, part.cut()) for part in row.parts]
    for tokens, (keys, values) in [*pieces, (row.tail, row.tail_arrays())]:
        seen = None if mask is None else mask[None, None, :, start : start + tokens]
        partials.append(over_shared(queries, keys, values, scale, seen))
        start += tokens
    return merged(partials, sinks, queries.dtype)
