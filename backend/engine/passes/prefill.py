"""Runs prompts through the model: one in chunks, or several short ones in one pass.

Several only if rows have their own lengths, because batches padded on the right give
wrong logits on several families of mlx-lm 0.32.
"""

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from backend.engine.kv.batch_caches import BatchCaches
from backend.engine.network import FreshCaches, Network
from backend.engine.plan import BatchPlan
from backend.engine.rows.row import Row


def prefill_chunk(network: Network, fresh_caches: FreshCaches, row: Row, count: int) -> None:
    """Feed the next `count` of the row's tokens, at most `row.prefill_left`.

    The chunk is computed on return: a cancel takes effect before the next one.

    Args:
        network: The model.
        fresh_caches: Creates caches for a row without any.
        row: The row of the prompt.
        count: The number of tokens.
    """
    if row.cache is None:
        row.cache = fresh_caches()
    chunk = row.token_ids[row.fed : row.fed + count]
    # The logits stay lazy: no product with the vocabulary is computed.
    network(mx.array([chunk]), cache=row.cache)
    mx.eval([cache.state for cache in row.cache])
    row.fed += count


def prefill_together(
    network: Network, fresh_caches: FreshCaches, plan: BatchPlan, rows: Sequence[Row]
) -> None:
    """Feed the rest of some prompts in one pass; computed on return.

    The shorter ones are padded on the right; the padding is dropped.

    Args:
        network: The model.
        fresh_caches: Creates caches for rows without any.
        plan: The batch plan of the model, whose rows may take different numbers of tokens.
        rows: The rows of the prompts, two or more.
    """
    lefts = [row.prefill_left for row in rows]
    batch = BatchCaches(replace(plan, packs=False))
    batch.regroup([], [fresh_caches() if row.cache is None else row.cache for row in rows])
    batch.take(network, [row.token_ids[row.fed : -1] for row in rows])
    batch.keep(lefts)
    for place, (row, left) in enumerate(zip(rows, lefts, strict=True)):
        row.cache = batch.extract(place)
        row.fed += left
    mx.eval([cache.state for row in rows for cache in row.cache or ()])
