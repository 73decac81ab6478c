"""Run one row's prompt through the model, a chunk at a time.

One row at a time, because ragged batches give wrong logits on several families of mlx-lm 0.32.
"""

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from backend.engine.network import Network
from backend.engine.row import Row


def prefill_chunk(network: Network, row: Row, count: int) -> None:
    """Feed the next `count` of the row's tokens, at most `row.prefill_left`.

    The chunk is computed when this returns: a cancel takes effect before the next one.
    """
    if row.cache is None:
        row.cache = make_prompt_cache(network)
    chunk = row.token_ids[row.fed : row.fed + count]
    # The logits stay lazy: no product with the vocabulary is computed.
    network(mx.array([chunk]), cache=row.cache)
    mx.eval([cache.state for cache in row.cache])
    row.fed += count
