"""Checks at load whether a model computes the same in a batch as alone.

Some families of mlx-lm 0.32 do not (wrong masks, caches without `merge`): in a batch, they would
answer wrongly without any error. Others compute with the keys that they fetch, and cannot have rows
of unlike length.
"""

import logging
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate

import mlx.core as mx

from backend.cache.layers import PositionLayer, keys_and_values, layer_kind
from backend.cache.layout import cache_leaves
from backend.cache.packing import UNPACKED
from backend.engine.kv.batch_caches import BatchCaches, Batching, BatchPlan
from backend.engine.kv.calibration import measured_overhead
from backend.engine.network import MODEL_ERRORS, Caches, FreshCaches, Network
from backend.engine.passes.caches import CacheFactory
from backend.engine.passes.ranks import ALONE, Ranks
from backend.engine.trials.pass_costs import measured_pass_seconds
from backend.engine.trials.self_check import SHORT_PROMPTS
from backend.engine.trials.sharing_check import is_shareable
from backend.engine.trials.trial_steps import computed, cut, difference, prefilled
from backend.model.checkpoint.failures import one_line

_STEPS = 3
# Passes of several tokens: the second shows whether rows went back correctly after the first.
_WIDE_PASSES = 2
_MAX_WIDTH = 4
_COMPARED_TOKENS = 6
# All rows in one group, and each in its own.
_OVERHEADS = (float("inf"), 0.0)

log = logging.getLogger(__name__)


def batch_plan(
    network: Network,
    fresh_caches: CacheFactory,
    token_ids: Sequence[int],
    lengths: Sequence[int] = SHORT_PROMPTS,
    *,
    ranks: Ranks = ALONE,
    drafts: bool = False,
) -> BatchPlan:
    """Return how rows of this model may be batched; the log gives its limits and their reasons.

    Args:
        network: The model.
        fresh_caches: Creates the caches of one sequence.
        token_ids: Tokens of a text: prompts are cut from it, repeated as needed.
        lengths: The lengths of the prompts, in tokens.
        ranks: The ranks of the model, which all get the same plan.
        drafts: Whether to check that rows may take drafted tokens.
    """
    trial = BatchTrial(network, fresh_caches, token_ids, lengths, ranks=ranks)
    plan = _plan(trial, lambda: is_shareable(network, fresh_caches, token_ids, ranks))
    plan = replace(plan, starts_early=not ranks.are_several)
    return _with_drafts(plan, trial, network, fresh_caches, token_ids) if drafts else plan


def _plan(trial: "BatchTrial", is_shareable: Callable[[], bool]) -> BatchPlan:
    fault = trial.ragged_fault(Batching.RAGGED)
    if fault is None:
        shares = is_shareable()
        # A prompt that pauses midway, to store a window or a state, is fed alone.
        several = trial.keeps_positions and trial.fault(BatchPlan(), width=_MAX_WIDTH) is None
        return BatchPlan(Batching.RAGGED, trial.overhead(), shares, several)
    if trial.ragged_fault(Batching.LATENT) is None:
        return BatchPlan(Batching.LATENT, trial.overhead())
    padded_fault = trial.fault(BatchPlan(Batching.PADDED))
    if padded_fault is None:
        log.info("batches of this model are padded to their longest row: %s", fault)
        return BatchPlan(Batching.PADDED)
    log.warning("this model runs one request at a time: %s", padded_fault)
    return BatchPlan(Batching.NONE)


def _with_drafts(
    plan: BatchPlan,
    trial: "BatchTrial",
    network: Network,
    fresh_caches: CacheFactory,
    token_ids: Sequence[int],
) -> BatchPlan:
    """Return a plan with the costs of drafts, if rows may take drafted tokens."""
    if plan.has_own_lengths and trial.drafts_fault(packed := replace(plan, packs=True)) is None:
        plan = packed
    elif fault := trial.drafts_fault(plan):
        log.info("nothing is drafted for this model: %s", fault)
        return plan
    return replace(plan, pass_seconds=measured_pass_seconds(network, fresh_caches, token_ids))


class BatchTrial:
    """Decodes prompts of unlike length for some steps, alone and in batches."""

    def __init__(
        self,
        network: Network,
        fresh_caches: FreshCaches,
        token_ids: Sequence[int],
        lengths: Sequence[int] = SHORT_PROMPTS,
        *,
        ranks: Ranks = ALONE,
    ) -> None:
        """Prefill the prompts; the arguments are those of `batch_plan`."""
        self._network = network
        self._ranks = ranks
        self._lengths = tuple(lengths)
        self._tokens = [
            cut(token_ids, start, n + _MAX_WIDTH * _WIDE_PASSES) for start, n in enumerate(lengths)
        ]
        self._prefilled = [
            prefilled(ranks, network, fresh_caches(), tokens[:n])
            for tokens, n in zip(self._tokens, lengths, strict=True)
        ]

    def ragged_fault(self, batching: Batching) -> str | None:
        """Return why rows may not have their own lengths, or `None` if they may."""
        plans = [BatchPlan(batching, overhead) for overhead in _OVERHEADS]
        return next(filter(None, map(self.fault, plans)), None)

    def drafts_fault(self, plan: BatchPlan) -> str | None:
        """Return why rows may not take several tokens in a pass and give some back, if so."""
        alone = range(len(self._lengths) - 1, len(self._lengths))
        if fault := self.fault(plan, width=_MAX_WIDTH, rows=alone):
            return f"alone, {fault}"
        return None if plan.batching is Batching.NONE else self.fault(plan, width=_MAX_WIDTH)

    def fault(
        self, plan: BatchPlan, *, width: int = 1, rows: Sequence[int] | None = None
    ) -> str | None:
        """Return why rows may not be batched by a plan, or `None` if they may.

        Args:
            plan: How they are batched.
            width: Tokens per pass; of several, some rows do not keep all.
            rows: The rows of the batch; `None` means all.
        """
        if plan.batching is Batching.PADDED and (fault := self._ranks.fault(self._merge_fault())):
            return fault
        rows = range(len(self._lengths)) if rows is None else rows
        try:
            together = self._together(plan, width, rows)
        except MODEL_ERRORS as error:
            return f"a batch raises {type(error).__name__}: {one_line(error)}"
        alone = [self._alone[row][: len(t)] for row, t in zip(rows, together, strict=True)]
        gap = self._ranks.fault(difference(alone, together))
        return gap and f"{gap} in a batch"

    @property
    def keeps_positions(self) -> bool:
        """Whether every layer keeps the keys and values of all positions."""
        kinds = (layer_kind(leaf, UNPACKED) for leaf in cache_leaves(self._prefilled[0]))
        has_positions = all(isinstance(kind, PositionLayer) for kind in kinds)
        return self._ranks.fault(None if has_positions else "not every position is kept") is None

    def overhead(self) -> float:
        """Return the cost of one more group of rows, in positions of a row."""
        leaves = cache_leaves(self._prefilled[0])
        pairs = (keys_and_values(leaf) for leaf in leaves if not leaf.empty())
        like = next(filter(None, pairs), None)
        return self._ranks.largest(0.0 if like is None else measured_overhead(*like))

    def _merge_fault(self) -> str | None:
        missing = (leaf for leaf in self._prefilled[0] if not hasattr(leaf, "merge"))
        return next((f"{type(leaf).__name__} cannot be merged" for leaf in missing), None)

    @cached_property
    def _alone(self) -> list[mx.array]:
        """The logits [S, V] of each row alone."""
        rows = zip(deepcopy(self._prefilled), self._tokens, self._lengths, strict=True)
        return [
            mx.concatenate([self._stepped(caches, t) for t in tokens[n:][:_COMPARED_TOKENS]])
            for caches, tokens, n in rows
        ]

    def _stepped(self, caches: Caches, token_id: int) -> mx.array:
        return computed(self._ranks, lambda: self._network(mx.array([[token_id]]), cache=caches)[0])

    def _together(self, plan: BatchPlan, width: int, rows: Sequence[int]) -> list[mx.array]:
        """Return the logits [S, V] of rows in one batch."""
        caches = BatchCaches(plan)
        prefilled_rows = deepcopy([self._prefilled[row] for row in rows])
        self._ranks.attempt(lambda: caches.regroup([], prefilled_rows))
        fed = [self._lengths[row] for row in rows]
        logits: list[list[mx.array]] = [[] for _ in rows]
        for step in range(_STEPS if width == 1 else _WIDE_PASSES):
            counts, kept = _taken(caches, len(rows), width, step)
            inputs = [
                cut(self._tokens[row][n:][:count], 0, count)
                for row, n, count in zip(rows, fed, counts, strict=True)
            ]
            made = self._forwarded(caches, inputs)
            self._ranks.attempt(partial(caches.keep, kept))
            firsts = accumulate(counts, initial=0)
            for place, (first, count) in enumerate(zip(firsts, kept, strict=False)):
                logits[place].append(made[first : first + count])
                fed[place] += count
        return [mx.concatenate(row)[:_COMPARED_TOKENS] for row in logits]

    def _forwarded(self, caches: BatchCaches, inputs: Sequence[Sequence[int]]) -> mx.array:
        return computed(self._ranks, lambda: caches.take(self._network, inputs))


def _taken(
    caches: BatchCaches, rows: int, width: int, step: int
) -> tuple[Sequence[int], Sequence[int]]:
    """Return how many tokens each row takes in a pass of several, and how many it keeps.

    Every other row of several takes one token less, and some keep all but the last. If rows can
    only keep all or nothing, every other row takes half as many tokens as the others, which keep
    nothing; in the next pass all keep all.
    """
    if width == 1:
        return [1] * rows, [1] * rows
    if caches.keeps_parts:
        takes = [width - place % 2 for place in range(rows)]
        return takes, [count - (place // 2 + step + 1) % 2 for place, count in enumerate(takes)]
    if step % 2:
        return [width] * rows, [width] * rows
    takes_all = [rows == 1 or place % 2 == 1 for place in range(rows)]
    return (
        [width if is_whole else width // 2 for is_whole in takes_all],
        [0 if is_whole else width // 2 for is_whole in takes_all],
    )
