"""Trims sliding windows to their size.

In mlx-lm 0.32, a chunk of a prompt leaves all its positions in the ring until the next token or
chunk. That may take long for a prompt that waits for its turn.
"""

from collections.abc import Sequence

import mlx.core as mx

from backend.cache.layers import UpstreamCache, WindowLayer, layer_kind
from backend.cache.layout import cache_leaves
from backend.cache.packing import UNPACKED


def trim_windows(caches: Sequence[UpstreamCache]) -> None:
    """Drop positions that no later token attends to; computed on return."""
    trimmed = []
    for leaf in cache_leaves(caches):
        kind = layer_kind(leaf, UNPACKED)
        if isinstance(kind, WindowLayer) and _exceeds(leaf, kind.size):
            window = kind.slices(leaf, leaf.offset - kind.size, leaf.offset)
            kind.restore(leaf, [window], leaf.offset)
            trimmed.append(leaf.state)
    mx.eval(trimmed)


def _exceeds(leaf: UpstreamCache, size: int) -> bool:
    return not leaf.empty() and leaf.keys.shape[-2] > size
