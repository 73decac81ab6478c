"""Lets an idle device compute the first layers of a pass while the later ones are being built."""

from collections.abc import Iterator
from typing import Any, SupportsIndex, TypeAlias

import mlx.core as mx

from backend.cache.layers import is_empty
from backend.engine.network import Caches, Network

# An upstream cache, or a list of some.
Untyped: TypeAlias = Any


def early_start(network: Network, inputs: mx.array, cache: Caches) -> mx.array:
    """Append tokens [B, T] to the caches and return the logits [B, T, V], lazily.

    For a device with nothing else to compute: it does not wait until Python has built the graph.
    """
    layers = _Layers(cache)
    logits = network(inputs, cache=layers)
    # Some models replace entries of the given list.
    cache[:] = layers.copy()
    return logits


class _Layers(list[Any]):
    """The caches of all layers, which a network goes through while it builds its graph."""

    def __iter__(self) -> Iterator[Any]:
        """Yield each; after one, two, four and so on, the device begins with those before."""
        for count, cache in enumerate(super().__iter__()):
            if count.bit_count() == 1 and not is_empty(before := self[count - 1]):
                mx.async_eval(before.state)
            yield cache

    def __getitem__(self, index: SupportsIndex | slice) -> Untyped:
        """Return a cache, or some that are gone through in the same way."""
        found = super().__getitem__(index)
        return _Layers(found) if isinstance(index, slice) else found
