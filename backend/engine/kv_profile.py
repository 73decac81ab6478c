"""Find out what the caches of a model take, from the shapes of its own after a few tokens."""

from collections import Counter
from collections.abc import Iterable

import mlx.core as mx

from backend.cache.layers import PositionLayer, UpstreamCache, WindowLayer, layer_kind
from backend.cache.layout import cache_leaves
from backend.cache.packing import UNPACKED
from backend.engine.admission import ALLOCATION_STEP_TOKENS, KvProfile, WindowProfile
from backend.engine.network import FreshCaches, Network

_PROBE = (0, 1)


def measure(network: Network, fresh_caches: FreshCaches) -> KvProfile:
    """Return what one sequence takes; computes two tokens."""
    caches = fresh_caches()
    mx.eval(network(mx.array([_PROBE]), cache=caches), [cache.state for cache in caches])
    per_token, fixed = 0, 0
    windows: Counter[int] = Counter()
    for leaf in cache_leaves(caches):
        growth, size = _growth(leaf), _window(leaf)
        if growth and size:
            windows[size] += growth
        elif growth:
            per_token += growth
        else:
            fixed += leaf.nbytes
    layers = (WindowProfile(growth, size) for size, growth in sorted(windows.items()))
    return KvProfile(per_token, fixed, tuple(layers))


def _growth(leaf: UpstreamCache) -> int:
    """Return the bytes of a position; 0 for a layer that has a state of one size, or nothing."""
    if leaf.empty():
        return 0
    kind = layer_kind(leaf, UNPACKED)
    if isinstance(kind, PositionLayer):
        return _per_position(kind.read(leaf))
    keys = getattr(leaf, "keys", None)
    return _per_position((keys, leaf.values)) if isinstance(keys, mx.array) else 0


def _window(leaf: UpstreamCache) -> int:
    """Return how many positions a layer keeps at most; 0 is all."""
    kind = layer_kind(leaf, UNPACKED)
    if isinstance(kind, WindowLayer):
        return kind.size
    if chunk := getattr(leaf, "chunk_size", 0):
        # Its size is a bound on what is seen, and it is allocated in steps beyond.
        return int(chunk) + ALLOCATION_STEP_TOKENS
    return int(getattr(leaf, "max_size", 0))


def _per_position(arrays: Iterable[mx.array]) -> int:
    return sum(array.nbytes // array.shape[-2] for array in arrays)
