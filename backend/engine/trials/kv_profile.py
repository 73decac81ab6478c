"""Measures the memory of a model's caches by computing a few tokens."""

from collections import Counter

import mlx.core as mx

from backend.cache.layers import cache_leaves, growth_of
from backend.engine.network import Caches, FreshCaches, Network
from backend.engine.rows.admission import KvProfile, WindowProfile

_PROBE = (0, 1)


def measure(network: Network, fresh_caches: FreshCaches) -> KvProfile:
    """Return the memory of one sequence's caches; computes two tokens."""
    caches = fresh_caches()
    mx.eval(network(mx.array([_PROBE]), cache=caches), [cache.state for cache in caches])
    return _profile(caches)


def foresee(network: Network, fresh_caches: FreshCaches) -> KvProfile:
    """Return the result of `measure` from shapes alone, without reading weights."""
    caches = fresh_caches()
    network(mx.array([_PROBE]), cache=caches)
    return _profile(caches)


def _profile(caches: Caches) -> KvProfile:
    growths = [growth_of(leaf) for leaf in cache_leaves(caches)]
    windows: Counter[int] = Counter()
    for growth in growths:
        if growth.window:
            windows[growth.window] += growth.bytes_per_token
    return KvProfile(
        bytes_per_token=sum(each.bytes_per_token for each in growths if not each.window),
        fixed_bytes=sum(each.fixed_bytes for each in growths),
        windows=tuple(WindowProfile(total, size) for size, total in sorted(windows.items())),
    )
