"""Checks at load whether rows of a model may use stored prefixes in place."""

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
from backend.engine.passes.ranks import ALONE, Ranks
from backend.engine.trials.trial_steps import computed, cut, difference, prefilled

# Lengths of two parts that two rows share, and of each row's own tail.
_PARTS = (13, 8)
_TAILS = (3, MIN_JOINED_TOKENS + 1)
_STEPS = 2

log = logging.getLogger(__name__)


def is_shareable(
    network: Network,
    fresh_caches: CacheFactory,
    token_ids: Sequence[int],
    ranks: Ranks = ALONE,
) -> bool:
    """Tell whether rows that share a prefix compute the same as each row alone.

    Args:
        network: The model.
        fresh_caches: Creates the caches of one sequence.
        token_ids: Tokens of a text: prompts are cut from it, repeated as needed.
        ranks: The ranks of the model, which all get the same answer.
    """
    if fresh_caches.group_sizes:
        return False
    trial = _SharingTrial(network, ranks)
    prefix = cut(token_ids, 0, sum(_PARTS))
    rows = [cut(token_ids, 5 * n, n + _STEPS) for n in _TAILS]
    try:
        expected = [trial.alone(fresh_caches(), prefix, row) for row in rows]
        base = prefilled(ranks, network, _referring(fresh_caches)(), prefix)
        # Some ranks of a pipeline may have such caches, and others none.
        if not ranks.any(any(isinstance(leaf, RowKV) for leaf in cache_leaves(base))):
            return False
        alone = [trial.alone(caches, [], row) for caches, row in _on_parts(base, rows)]
        together = trial.together(_on_parts(base, rows))
    except MODEL_ERRORS as error:
        log.info("stored prefixes are copied for each request: %s", error)
        return False
    gap = ranks.fault(difference(expected, alone) or difference(expected, together))
    if gap:
        log.info("stored prefixes are copied for each request: %s", gap)
    return gap is None


class _SharingTrial:
    def __init__(self, network: Network, ranks: Ranks) -> None:
        self._network = network
        self._ranks = ranks

    def alone(self, caches: Caches, prefix: Sequence[int], row: Sequence[int]) -> mx.array:
        """Return the logits [S, V] of the last tokens of a row, each in its own pass."""
        prefilled(self._ranks, self._network, caches, [*prefix, *row[:-_STEPS]])
        steps = [self._stepped(caches, token_id) for token_id in row[-_STEPS:]]
        return mx.concatenate(steps)

    def together(self, rows: Sequence[tuple[Caches, Sequence[int]]]) -> list[mx.array]:
        """Return the same logits for rows in one batch."""
        batch = BatchCaches(BatchPlan())
        ready = [
            prefilled(self._ranks, self._network, caches, row[:-_STEPS]) for caches, row in rows
        ]
        self._ranks.attempt(lambda: batch.regroup([], ready))
        steps = [self._forwarded(batch, [[row[i]] for _, row in rows]) for i in range(-_STEPS, 0)]
        return list(mx.concatenate(steps, axis=1))

    def _stepped(self, caches: Caches, token_id: int) -> mx.array:
        return computed(self._ranks, lambda: self._network(mx.array([[token_id]]), cache=caches)[0])

    def _forwarded(self, batch: BatchCaches, inputs: Sequence[Sequence[int]]) -> mx.array:
        return computed(self._ranks, lambda: batch.forward(self._network, mx.array(inputs)))


def _referring(fresh_caches: CacheFactory) -> CacheFactory:
    return replace(fresh_caches, plan=BatchPlan(shares_prefixes=True))


def _on_parts(base: Caches, rows: Sequence[Sequence[int]]) -> list[tuple[Caches, Sequence[int]]]:
    """Return caches for each row, all beginning with the same parts."""
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
