"""Layers whose keys and values are not plain arrays: quantised ones, and compressed ones (MLA)."""

import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from backend.cache.layers import UpstreamCache
from backend.engine.kv.buffers import Buffers
from backend.engine.kv.layer import RaggedKV
from backend.engine.kv.ledger import Ledger

# Words, scales and biases.
_PARTS = 3


class QuantizedKV(RaggedKV):
    """Quantised keys and values: words, scales and biases of each."""

    def __init__(self, ledger: Ledger, like: UpstreamCache) -> None:
        """Start without rows, with the group size and the bits of `like`."""
        super().__init__(ledger, like)
        self._packing = {"group_size": like.group_size, "bits": like.bits}

    def _encoded(self, keys: mx.array, values: mx.array) -> Buffers:
        return (*mx.quantize(keys, **self._packing), *mx.quantize(values, **self._packing))

    def _attend(
        self,
        queries: mx.array,
        kept: Buffers,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None,
    ) -> mx.array:
        if sinks is not None:
            raise TypeError("quantised attention does not support sinks")
        return quantized_scaled_dot_product_attention(
            queries, kept[:_PARTS], kept[_PARTS:], scale, mask, **self._packing
        )

    def _new_cache(self) -> UpstreamCache:
        return self._kind(**self._packing)

    def _read(self, cache: UpstreamCache) -> Buffers | None:
        return None if cache.keys is None else (*cache.keys, *cache.values)

    def _fill(self, cache: UpstreamCache, buffers: Buffers, length: int) -> None:
        cache.keys, cache.values = buffers[:_PARTS], buffers[_PARTS:]
        cache.offset = length


class LatentKV(RaggedKV):
    """Compressed keys, which are also the values, together with the keys of positions (MLA).

    These families multiply the queries of positions with the keys that they fetch, and pass the
    product to attention as a mask. They fetch an identity matrix here, so that attention gets those
    queries, and can multiply them group by group. One token per row of the network: with several,
    the families decompress the fetched keys. So passes of several tokens are packed.
    """

    def keys_and_values(self) -> tuple[object, object]:
        """Return a stand-in for the compressed keys, and an identity matrix [1, 1, R, R]."""
        _, positions = next(iter(self._buffers.values()))
        return self, mx.eye(positions.shape[-1], dtype=positions.dtype)[None, None]

    def attend(
        self, queries: mx.array, scale: float, mask: object, sinks: mx.array | None
    ) -> mx.array:
        """Return the attention over compressed keys [T, heads, 1, compressed width].

        Args:
            queries: [T, heads, 1, compressed width].
            scale: Of their scores.
            mask: The queries of positions [T, heads, 1, R], scaled.
            sinks: No family has any.
        """
        if not isinstance(mask, mx.array) or sinks is not None:
            raise TypeError("compressed keys need the queries of positions")
        current = self.current
        first = self._attend_latent(current.first(queries), current.first(mask), scale)
        wide = [
            _over_latent(
                row.queries(queries), row.queries(mask), self.seen_by(row), row.causal, scale
            )
            for row in current.wide
        ]
        return current.joined(first, wide)

    def _attend_latent(self, queries: mx.array, positional: mx.array, scale: float) -> mx.array:
        """Return the attention of one token of each row."""
        outputs = [
            _over_latent(
                queries[span.take], positional[span.take], self.seen(span), span.array_mask, scale
            )
            for span in self.current.spans
        ]
        return self.current.in_order(outputs)


def _over_latent(
    queries: mx.array, positional: mx.array, kept: Buffers, mask: mx.array | None, scale: float
) -> mx.array:
    """Return the attention over compressed keys and keys of positions, where a mask allows it."""
    keys, positions = kept
    scores = positional @ positions.swapaxes(-1, -2)
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
    return mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=scale, mask=scores)
