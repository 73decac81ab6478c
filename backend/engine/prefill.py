"""Run one row's prompt through the model, a chunk at a time.

One row at a time, because ragged batches give wrong logits on several families of mlx-lm 0.32.
"""

import mlx.core as mx

from backend.engine.network import FreshCaches, Network
from backend.engine.row import Row


def prefill_chunk(network: Network, fresh_caches: FreshCaches, row: Row, count: int) -> None:
    """Feed the next `count` of the row's tokens, at most `row.prefill_left`.

    The chunk is computed when this returns: a cancel takes effect before the next one.

    Args:
        network: The model.
        fresh_caches: Makes caches for a row that has none.
        row: Whose prompt it is.
        count: How many tokens.
    """
    if row.cache is None:
        row.cache = fresh_caches()
    chunk = row.token_ids[row.fed : row.fed + count]
    # The logits stay lazy: no product with the vocabulary is computed.
    network(mx.array([chunk]), cache=row.cache)
    mx.eval([cache.state for cache in row.cache])
    row.fed += count
