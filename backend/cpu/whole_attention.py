"""Attention over keys that are one array, for some queries at a time."""

import mlx.core as mx

from backend.cpu.exponentials import pays
from backend.engine.kv.layer import merged, over_own

# Computed at once: 1 MiB, which a core's cache holds.
_PIECE_SCORES = 2**18
_CAUSAL = "causal"
_MATRIX = 2


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
    positions = keys.shape[2]
    scores = rows * heads * width * positions
    if not pays(scores, queries.dtype) or not _selects(mask):
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )
    step = max(1, _PIECE_SCORES // (rows * heads * positions))
    outputs = []
    for start in range(0, width, step):
        stop = min(start + step, width)
        # No query of the piece sees a later position.
        seen = positions - width + stop if mask == _CAUSAL else positions
        visible = _visible(mask, slice(start, stop), slice(seen - stop + start, seen))
        partial = over_own(
            queries[:, :, start:stop], keys[:, :, :seen], values[:, :, :seen], scale, visible
        )
        outputs.append(merged([partial], sinks, queries.dtype))
    return mx.concatenate(outputs, axis=2)


def _selects(mask: mx.array | str | None) -> bool:
    """Tell whether a mask says for each position whether it is visible, alike for all heads."""
    if not isinstance(mask, mx.array):
        return mask in (None, _CAUSAL)
    is_for_all_heads = mask.ndim == _MATRIX or (mask.ndim > _MATRIX and mask.shape[-3] == 1)
    return is_for_all_heads and bool(mask.dtype == mx.bool_)


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
    return part[None, None] if part.ndim == _MATRIX else part
