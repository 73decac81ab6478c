"""Attention of a single row with its first positions in the prompt cache."""

import mlx.core as mx

from backend.cache.row_kv import RowKV
from backend.engine.kv.partial import over_pieces


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

    def visible(start: int, stop: int) -> mx.array | None:
        return None if mask is None else mask[None, None, :, start:stop]

    pieces = [(part.tokens, part.cut()) for part in row.parts]
    pieces.append((row.tail, row.tail_arrays()))
    return over_pieces(queries, pieces, scale, visible, sinks)
