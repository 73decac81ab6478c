"""Find out at load time whether rows of a model may use stored prefixes where they lie."""

import logging
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import mlx.core as mx

from backend.cache.layout import cache_leaves
from backend.cache.row_kv import MIN_JOINED_TOKENS, Part, RowKV
from backend.engine.kv.batch_caches import BatchCaches, BatchPlan
from backend.engine.network import MODEL_ERRORS, Caches, Network
from backend.engine.passes.caches import CacheFactory
from backend.engine.passes.trial_steps import computed, cut, difference, prefilled

# Two parts that two rows share, and what each row has of its own.
_PARTS = (13, 8)
_TAILS = (3, MIN_JOINED_TOKENS + 1)
_STEPS = 2

log = logging.getLogger(__name__)


def is_shareable(network: Network, fresh_caches: CacheFactory, token_ids: Sequence[int]) -> bool:
    """Tell whether rows on one prefix compute what each computes by itself.

    Args:
        network: The model.
        fresh_caches: Makes the caches of one sequence.
        token_ids: Of a text: prompts are cut from it, and from its repetitions.
    """
    if fresh_caches.group_sizes:
        return False
    prefix = cut(token_ids, 0, sum(_PARTS))
    rows = [cut(token_ids, 5 * n, n + _STEPS) for n in _TAILS]
    try:
        expected = [_alone(network, fresh_caches(), prefix, row) for row in rows]
        base = prefilled(network, _referring(fresh_caches)(), prefix)
        if not any(isinstance(leaf, RowKV) for leaf in cache_leaves(base)):
            return False
        alone = [_alone(network, caches, [], row) for caches, row in _on_parts(base, rows)]
        together = _together(network, _on_parts(base, rows))
    except MODEL_ERRORS as error:
        log.info("stored prefixes are copied for each request: %s", error)
        return False
    gap = difference(expected, alone) or difference(expected, together)
    if gap:
        log.info("stored prefixes are copied for each request: %s", gap)
    return gap is None


def _referring(fresh_caches: CacheFactory) -> CacheFactory:
    return replace(fresh_caches, plan=BatchPlan(shares_prefixes=True))


def _on_parts(base: Caches, rows: Sequence[Sequence[int]]) -> list[tuple[Caches, Sequence[int]]]:
    """Return caches for each row that begin with the same parts."""
    parts = [_split(leaf) if isinstance(leaf, RowKV) else () for leaf in cache_leaves(base)]
    made = []
    for row in rows:
        caches = deepcopy(base)
        for leaf, shared in zip(cache_leaves(caches), parts, strict=True):
            if isinstance(leaf, RowKV):
                leaf.refer(shared)
        made.append((caches, row))
    return made


def _split(leaf: RowKV) -> tuple[Part, ...]:
    if leaf.empty():
        return ()
    first, second = _PARTS
    slices = leaf.slices(0, first), leaf.slices(first, first + second)
    return tuple(Part(arrays, tokens) for arrays, tokens in zip(slices, _PARTS, strict=True))


def _alone(network: Network, caches: Caches, prefix: Sequence[int], row: Sequence[int]) -> mx.array:
    """Return the logits [S, V] of the last tokens of a row, each in a pass of its own."""
    prefilled(network, caches, [*prefix, *row[:-_STEPS]])
    steps = [computed(network(mx.array([[t]]), cache=caches)[0]) for t in row[-_STEPS:]]
    return mx.concatenate(steps)


def _together(network: Network, rows: Sequence[tuple[Caches, Sequence[int]]]) -> list[mx.array]:
    """Return the same of rows in one batch."""
    batch = BatchCaches(BatchPlan())
    batch.regroup([], [prefilled(network, caches, row[:-_STEPS]) for caches, row in rows])
    steps = [
        computed(batch.forward(network, mx.array([[row[i]] for _, row in rows])))
        for i in range(-_STEPS, 0)
    ]
    return list(mx.concatenate(steps, axis=1))
