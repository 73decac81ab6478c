"""Routes upstream's attention to the caches of a batch whose rows keep their own lengths.

All families of mlx-lm and mlx-vlm, and the drafters of mlx-vlm, compute attention with
`scaled_dot_product_attention` of a module `base`, which their modules import by name. `install`
replaces it with a function that knows `RaggedKV`, in `base` and in every imported module.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeAlias, cast

import mlx.core as mx

from backend.cache.row_kv import RowKV
from backend.engine.kv.layer import RaggedKV
from backend.engine.kv.partial import over_pieces
from backend.model.checkpoint.upstream import reroute
from backend.model.device import DEVICE

_NAME = "scaled_dot_product_attention"
_BASES = ("mlx_lm.models.base", "mlx_vlm.models.base")
# Of upstream's function, after queries and keys.
_PARAMETERS = ("values", "cache", "scale", "mask", "sinks")

Attention: TypeAlias = Callable[..., Any]


def install() -> None:
    """Route the attention of all modules that have been imported; cheap if nothing is new."""
    reroute(_NAME, _BASES, _routed)


def _routed(upstream: Attention) -> Attention:
    @wraps(upstream)
    def attend(queries: mx.array, keys: object, *rest: object, **named: object) -> mx.array:
        given = dict(zip(_PARAMETERS, rest, strict=False)) | named
        scale, sinks = cast(float, given["scale"]), cast(mx.array | None, given.get("sinks"))
        mask = cast(mx.array | str | None, given.get("mask"))
        match keys:
            case RaggedKV():
                return keys.attend(queries, scale, mask, sinks)
            case RowKV():
                return attend_row(keys, queries, scale, cast(mx.array | None, mask), sinks)
            case mx.array() if not hasattr(given["cache"], "bits"):
                values = cast(mx.array, given["values"])
                is_large = queries.size // queries.shape[-1] * keys.shape[2] >= DEVICE.attend_from
                compute = DEVICE.attend if is_large else mx.fast.scaled_dot_product_attention
                return compute(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
            case _:
                return upstream(queries, keys, *rest, **named)

    return attend


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
