"""Checks whether rows of a model may use stored prefixes in place."""

import logging
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import mlx.core as mx

from backend.cache.layers import cache_leaves
from backend.cache.row_kv import MIN_JOINED_TOKENS, Part, RowKV
from backend.engine.findings import Page
from backend.engine.kv.batch_caches import BatchCaches
from backend.engine.network import MODEL_ERRORS, Caches, Network
from backend.engine.passes.caches import CacheFactory
from backend.engine.passes.ranks import ALONE, Ranks
from backend.engine.plan import BatchPlan
from backend.engine.trials.trial_steps import Pieces, computed, cut, difference, prefilled

# Lengths of two parts that two rows share, and of each row's own tail.
_PARTS = (13, 8)
_TAILS = (3, MIN_JOINED_TOKENS + 1)
_STEPS = 2


def is_shareable(
    network: Network,
    fresh_caches: CacheFactory,
    token_ids: Sequence[int],
    ranks: Ranks = ALONE,
    page: Page | None = None,
) -> Pieces[bool]:
    """Tell whether rows that share a prefix compute the same as each row alone.

    Args:
        network: The model.
        fresh_caches: Creates the caches of one sequence.
        token_ids: Tokens of a text: prompts are cut from it, repeated as needed.
        ranks: The ranks of the model, which all get the same answer.
        page: Gets the reason if not.
    """
    if fresh_caches.group_sizes:
        return False
    page = page or Page()
    trial = _SharingTrial(network, ranks)
    prefix = cut(token_ids, 0, sum(_PARTS))
    rows = [cut(token_ids, 5 * n, n + _STEPS) for n in _TAILS]
    try:
        gap = yield from _gap(trial, fresh_caches, prefix, rows)
    except MODEL_ERRORS as error:
        gap = str(error)
    if gap:
        page.say(logging.INFO, "stored prefixes are copied for each request: %s", gap)
    return gap is None


def _gap(
    trial: "_SharingTrial",
    fresh_caches: CacheFactory,
    prefix: Sequence[int],
    rows: Sequence[Sequence[int]],
) -> Pieces[str | None]:
    """Return how rows differ that use a prefix in place; an empty text if none can."""
    expected: list[mx.array] = []
    for row in rows:
        expected += [(yield from trial.alone(fresh_caches(), prefix, row))]
    base = yield from trial.prefilled(_referring(fresh_caches)(), prefix)
    # Some ranks of a pipeline may have such caches, and others none.
    if not trial.ranks.any(any(isinstance(leaf, RowKV) for leaf in cache_leaves(base))):
        return ""
    alone: list[mx.array] = []
    for caches, row in _on_parts(base, rows):
        alone += [(yield from trial.alone(caches, [], row))]
    together = yield from trial.together(_on_parts(base, rows))
    return trial.ranks.fault(difference(expected, alone) or difference(expected, together))


class _SharingTrial:
    def __init__(self, network: Network, ranks: Ranks) -> None:
        self._network = network
        self.ranks = ranks

    def prefilled(self, caches: Caches, tokens: Sequence[int]) -> Pieces[Caches]:
        return prefilled(self.ranks, self._network, caches, tokens)

    def alone(self, caches: Caches, prefix: Sequence[int], row: Sequence[int]) -> Pieces[mx.array]:
        """Return the logits [S, V] of the last tokens of a row, each in its own pass."""
        yield from self.prefilled(caches, [*prefix, *row[:-_STEPS]])
        steps = []
        for token_id in row[-_STEPS:]:
            steps.append(self._stepped(caches, token_id))
            yield
        return mx.concatenate(steps)

    def together(self, rows: Sequence[tuple[Caches, Sequence[int]]]) -> Pieces[list[mx.array]]:
        """Return the same logits for rows in one batch."""
        batch = BatchCaches(BatchPlan())
        ready: list[Caches] = []
        for caches, row in rows:
            ready += [(yield from self.prefilled(caches, row[:-_STEPS]))]
        self.ranks.attempt(lambda: batch.regroup([], ready))
        steps = []
        for i in range(-_STEPS, 0):
            steps.append(self._forwarded(batch, [[row[i]] for _, row in rows]))
            yield
        return list(mx.concatenate(steps, axis=1))

    def _stepped(self, caches: Caches, token_id: int) -> mx.array:
        return computed(self.ranks, lambda: self._network(mx.array([[token_id]]), cache=caches)[0])

    def _forwarded(self, batch: BatchCaches, inputs: Sequence[Sequence[int]]) -> mx.array:
        return computed(self.ranks, lambda: batch.forward(self._network, mx.array(inputs)))


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
