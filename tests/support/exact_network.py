"""A decoder in exact arithmetic: whatever is wrong in its caches shows in the next token.

A random tiny model may well draw the right token from a wrong cache. Here every output is a sum of
whole numbers over all positions that the caches should hold, each weighted by its place.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from scripts.tiny_models import VOCAB_SIZE

WINDOW = 12

_FACTOR = 181
_MODULUS = 32749
_MARGIN = 3.0

_FACTORIES = {
    "kv": KVCache,
    "window": lambda: RotatingKVCache(WINDOW),
    "state": lambda: ArraysCache(1),
    "pair": lambda: CacheList(KVCache(), KVCache()),
}


class ExactNetwork:
    """A network of one cache per kind: "kv", "window", "state" or "pair"."""

    def __init__(self, *kinds: str) -> None:
        self.layers = kinds

    def make_cache(self) -> list[Any]:
        return [_FACTORIES[kind]() for kind in self.layers]

    def __call__(self, inputs: mx.array, cache: Sequence[Any]) -> mx.array:
        tokens = inputs.astype(mx.int32)
        sums = [_layer(tokens, layer, salt) for salt, layer in enumerate(cache)]
        target = mx.remainder(sum(sums), VOCAB_SIZE)[..., None]
        vocabulary = mx.arange(VOCAB_SIZE)
        noise = mx.remainder(vocabulary * 7 + target, 5) / 5.0
        return mx.where(vocabulary == target, _MARGIN, noise)


def _layer(tokens: mx.array, cache: Any, salt: int) -> mx.array:
    if isinstance(cache, CacheList):
        return _layer(tokens, cache[0], salt) + _layer(tokens, cache[1], salt + 1)
    return _fold(tokens, cache) if isinstance(cache, ArraysCache) else _attend(tokens, cache, salt)


def _attend(tokens: mx.array, cache: Any, salt: int) -> mx.array:
    """Sum over the visible positions; exact in float32 up to 5,000 of them."""
    count = tokens.shape[1]
    places = mx.array(cache.offset).reshape(-1, 1) + mx.arange(count)
    keys = mx.remainder(tokens * 31 + places * 17 + salt, 61)
    values = mx.remainder(tokens * 7 + places * 13 + salt, 53)
    mask = cache.make_mask(count, window_size=None, return_array=True)
    seen = [a[:, None, :, None].astype(mx.float32) for a in (keys, values)]
    keys, values = cache.update_and_fetch(*seen)
    products = (keys * values)[:, :, None, :, 0]
    visible = products if mask is None else mx.where(mask, products, 0.0)
    return visible.sum(axis=-1)[:, 0].astype(mx.int32)


def _fold(tokens: mx.array, cache: ArraysCache) -> mx.array:
    """Advance h <- (factor * h + token + 1) mod modulus over all tokens at once."""
    count = tokens.shape[1]
    powers = mx.array([pow(_FACTOR, n, _MODULUS) for n in range(count + 1)], mx.int32)
    ages = mx.arange(count)[:, None] - mx.arange(count)
    weights = mx.where(ages >= 0, powers[mx.maximum(ages, 0)], 0)
    before = mx.zeros((tokens.shape[0], 1), mx.int32) if cache[0] is None else cache[0]
    new = mx.remainder(weights * (tokens[:, None, :] + 1), _MODULUS).sum(axis=-1)
    folded = mx.remainder(before * powers[1:] + new, _MODULUS)
    cache[0] = folded[:, -1:]
    return folded
