"""Fixes bugs of mlx-lm 0.32's model code, on networks built with it."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import mlx.core as mx

from backend.model.checkpoint.upstream import Network

# Upstream's own values.
Untyped: TypeAlias = Any

_GROUPED_AXES = 5


def mend(network: Network) -> None:
    """Fix the known bugs of a network's code."""
    if put_right := _MENDS.get(type(network).__module__):
        put_right(network)


def _take_masks_of_batches(network: Network) -> None:
    """Let attention with scores [B, G, H, T, S] take masks [B, 1, T, S].

    Upstream broadcasts the batch rows along the groups of heads.
    """
    for layer in network.layers:
        attention = layer.self_attn
        if attention.repeats > 1:
            attention.__class__ = _masked_by_row(type(attention))


def _masked_by_row(kind: type) -> type:
    def call(
        self: Untyped, x: mx.array, mask: mx.array | None = None, cache: Untyped = None
    ) -> mx.array:
        if mask is not None and mask.ndim == _GROUPED_AXES - 1:
            mask = mask[:, :, None]
        output: mx.array = kind.__call__(self, x, mask, cache)
        return output

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


_MENDS: Mapping[str, Callable[[Network], None]] = {
    "mlx_lm.models.gemma2": _take_masks_of_batches,
}
