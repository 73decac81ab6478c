"""Checks whether a model computes the same in a batch, or on a stored prefix, as alone.

Some families of mlx-lm 0.32 do not (wrong masks, caches without `merge`): in a batch, they would
answer wrongly without any error. Others compute with the keys that they fetch, and cannot have rows
of unlike length.
"""

import logging
from collections.abc import Generator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TypeAlias

import mlx.core as mx

from backend.cache.kv import MIN_JOINED_TOKENS, Part, RowKV
from backend.cache.layers import cache_leaves, class_of
from backend.engine.findings import Page
from backend.engine.kv.batch_caches import BatchCaches
from backend.engine.passes.agreement import ALONE, Ranks
from backend.engine.passes.caches import CacheFactory
from backend.engine.plan import MODEL_ERRORS, Batching, BatchPlan, Caches, Decoder
from backend.engine.trials.pass_costs import measured_overhead, measured_pass_seconds
from backend.engine.trials.trial_steps import (
    SHORT_PROMPTS,
    Pieces,
    computed,
    cut,
    difference,
    largest_gap,
    prefilled,
)
from backend.model.checkpoint.failures import one_line

# Lengths of two parts that two rows share, and of each row's own tail.
_PARTS = (13, 8)
_TAILS = (3, MIN_JOINED_TOKENS + 1)
_SHARED_STEPS = 2


def is_shareable(trial: "BatchTrial", page: Page) -> Pieces[bool]:
    """Tell whether rows that share a prefix compute the same as each row alone.

    All ranks get the same answer; the page gets the reason if not.
    """
    if trial.fresh_caches.group_sizes:
        return False
    prefix = cut(trial.token_ids, 0, sum(_PARTS))
    rows = [cut(trial.token_ids, 5 * n, n + _SHARED_STEPS) for n in _TAILS]
    try:
        gap = yield from _sharing_gap(trial, prefix, rows)
    except MODEL_ERRORS as error:
        gap = str(error)
    if gap:
        page.say(logging.INFO, "stored prefixes are copied for each request: %s", gap)
    return gap is None


def _sharing_gap(
    trial: "BatchTrial", prefix: Sequence[int], rows: Sequence[Sequence[int]]
) -> Pieces[str | None]:
    """Return how rows differ that use a prefix in place; an empty text if none can."""
    expected: list[mx.array] = []
    for row in rows:
        expected += [(yield from _after(trial, trial.fresh_caches(), [*prefix, *row]))]
    referring = replace(trial.fresh_caches, plan=BatchPlan(shares_prefixes=True))
    base = yield from trial.fed(referring(), prefix)
    # Some ranks of a pipeline may have such caches, and others none.
    if not trial.ranks.any(any(isinstance(leaf, RowKV) for leaf in cache_leaves(base))):
        return ""
    alone: list[mx.array] = []
    for caches, row in _on_parts(base, rows):
        alone += [(yield from _after(trial, caches, row))]
    together = yield from _after_together(trial, _on_parts(base, rows))
    return trial.ranks.fault(difference(expected, alone) or difference(expected, together))


def _after(trial: "BatchTrial", caches: Caches, row: Sequence[int]) -> Pieces[mx.array]:
    """Return the logits [S, V] of the last tokens of a row, each in its own pass."""
    yield from trial.fed(caches, row[:-_SHARED_STEPS])
    steps = []
    for token_id in row[-_SHARED_STEPS:]:
        steps.append(trial.stepped(caches, token_id))
        yield
    return mx.concatenate(steps)


def _after_together(
    trial: "BatchTrial", rows: Sequence[tuple[Caches, Sequence[int]]]
) -> Pieces[list[mx.array]]:
    """Return the same logits for rows in one batch."""
    batch = BatchCaches(BatchPlan())
    ready: list[Caches] = []
    for caches, row in rows:
        ready += [(yield from trial.fed(caches, row[:-_SHARED_STEPS]))]
    trial.ranks.attempt(lambda: batch.regroup([], ready))
    steps = []
    for i in range(-_SHARED_STEPS, 0):
        inputs = mx.array([[row[i]] for _, row in rows])
        steps.append(computed(trial.ranks, partial(batch.forward, trial.network, inputs)))
        yield
    return list(mx.concatenate(steps, axis=1))


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


_STEPS = 3
# Passes of several tokens: the second shows whether rows went back correctly after the first.
_WIDE_PASSES = 2
_MAX_WIDTH = 4
_COMPARED_TOKENS = 6
# All rows in one group, and each in its own.
_OVERHEADS = (float("inf"), 0.0)

Planning: TypeAlias = Generator[BatchPlan | None, None, BatchPlan]
"""Trials in pieces: yields `None` after a pass, or a plan as soon as it may be used."""


def planning(
    trial: "BatchTrial", page: Page, *, drafts: bool, known: BatchPlan | None = None
) -> Planning:
    """Find how rows of a model may be batched; the log gives its limits and their reasons.

    Args:
        trial: Of the model, not begun; its ranks all get the same plan.
        drafts: Whether to check that rows may take drafted tokens.
        known: The result of an earlier trial without drafts.
    """
    yield from trial.prefill()
    plan = known
    if plan is None:
        plan = yield from _without_drafts(trial, page)
    if not drafts:
        return plan
    yield plan
    return (yield from _with_drafts(plan, trial, page))


def _without_drafts(trial: "BatchTrial", page: Page) -> Planning:
    starts_early = not trial.ranks.are_several
    fault = yield from trial.ragged_fault(Batching.RAGGED)
    if fault is None:
        plan = BatchPlan(Batching.RAGGED, starts_early=starts_early)
        yield plan
        return (yield from _refined(plan, trial, page))
    if (yield from trial.ragged_fault(Batching.LATENT)) is None:
        return BatchPlan(Batching.LATENT, trial.overhead(), starts_early=starts_early)
    padded_fault = yield from trial.fault(BatchPlan(Batching.PADDED))
    if padded_fault is None:
        page.say(logging.INFO, "batches of this model are padded to their longest row: %s", fault)
        return BatchPlan(Batching.PADDED, starts_early=starts_early)
    # Stages of a pipeline tie their sent arrays to the cache of one row.
    by_row = BatchPlan(Batching.BY_ROW)
    if not trial.ranks.are_several and (yield from trial.fault(by_row)) is None:
        page.say(logging.INFO, "attention of this model runs row by row: %s", padded_fault)
        return BatchPlan(Batching.BY_ROW, starts_early=starts_early)
    page.say(logging.WARNING, "this model runs one request at a time: %s", padded_fault)
    return BatchPlan(Batching.NONE, starts_early=starts_early)


def _refined(plan: BatchPlan, trial: "BatchTrial", page: Page) -> Planning:
    """Return the plan with the other abilities of rows that have their own lengths."""
    shares = yield from is_shareable(trial, page)
    # A prompt that pauses midway, to store a window or a state, is fed alone.
    several = False
    if trial.keeps_positions:
        several = (yield from trial.fault(BatchPlan(), width=_MAX_WIDTH)) is None
    return replace(plan, overhead=trial.overhead(), shares_prefixes=shares, takes_several=several)


def _with_drafts(plan: BatchPlan, trial: "BatchTrial", page: Page) -> Planning:
    """Return a plan with the costs of drafts, if rows may take drafted tokens."""
    packed = replace(plan, packs=True)
    if plan.has_own_lengths and (yield from trial.drafts_fault(packed)) is None:
        plan = packed
    elif fault := (yield from trial.drafts_fault(plan)):
        page.say(logging.INFO, "nothing is drafted for this model: %s", fault)
        return plan
    seconds = yield from measured_pass_seconds(trial.network, trial.fresh_caches, trial.token_ids)
    return replace(plan, pass_seconds=seconds)


class BatchTrial:
    """Decodes prompts of unlike length for some steps, alone and in batches.

    Attributes:
        token_ids: Tokens of a text: prompts are cut from it, repeated as needed.
        alone: [S, V] the logits of each row alone, once there has been a batch.
    """

    def __init__(
        self,
        network: Decoder,
        fresh_caches: CacheFactory,
        token_ids: Sequence[int],
        lengths: Sequence[int] = SHORT_PROMPTS,
        *,
        ranks: Ranks = ALONE,
    ) -> None:
        self.network = network
        # Those of a running session would change with its plan.
        self.fresh_caches = replace(fresh_caches, plan=BatchPlan())
        self.token_ids = token_ids
        self.ranks = ranks
        self._lengths = tuple(lengths)
        self._tokens = [
            cut(token_ids, start, n + _MAX_WIDTH * _WIDE_PASSES) for start, n in enumerate(lengths)
        ]
        self._prefilled: list[Caches] = []
        self.alone: list[mx.array] = []
        self._exact: BatchTrial | None = None
        if fresh_caches.group_sizes:
            own = CacheFactory(network)
            self._exact = BatchTrial(network, own, token_ids, lengths, ranks=ranks)

    def prefill(self) -> Pieces[None]:
        """Compute the prompts, before anything else."""
        if self._exact is not None:
            yield from self._exact.prefill()
        for tokens, n in zip(self._tokens, self._lengths, strict=True):
            caches = self.fresh_caches()
            yield from self.fed(caches, tokens[:n])
            self._prefilled.append(caches)

    def ragged_fault(self, batching: Batching) -> Pieces[str | None]:
        """Return why rows may not have their own lengths, or `None` if they may."""
        if fault := self.ranks.fault(self._padding_fault()):
            return fault
        for overhead in _OVERHEADS:
            if fault := (yield from self.fault(BatchPlan(batching, overhead))):
                return fault
        return None

    def drafts_fault(self, plan: BatchPlan) -> Pieces[str | None]:
        """Return why rows may not take several tokens in a pass and give some back, if so."""
        alone = range(len(self._lengths) - 1, len(self._lengths))
        if fault := (yield from self.fault(plan, width=_MAX_WIDTH, rows=alone)):
            return f"alone, {fault}"
        if plan.batching is Batching.NONE:
            return None
        return (yield from self.fault(plan, width=_MAX_WIDTH))

    def fault(
        self, plan: BatchPlan, *, width: int = 1, rows: Sequence[int] | None = None
    ) -> Pieces[str | None]:
        """Return why rows may not be batched by a plan, or `None` if they may.

        Quantised caches are tried after exact ones. Rounding that differs a little may make the
        next code of a value, which may change logits as much as their quantisation does.

        Args:
            width: Tokens per pass; of several, some rows do not keep all.
            rows: The rows of the batch; `None` means all.
        """
        exact = self._exact
        if exact is not None and (fault := (yield from exact.fault(plan, width=width, rows=rows))):
            return fault
        if plan.batching is Batching.PADDED and (fault := self.ranks.fault(self._merge_fault())):
            return fault
        rows = range(len(self._lengths)) if rows is None else rows
        try:
            together = yield from self._together(plan, width, rows)
        except MODEL_ERRORS as error:
            return f"a batch raises {type(error).__name__}: {one_line(error)}"
        if not self.alone:
            self.alone = yield from self._computed_alone()
        alone = [self.alone[row][: len(t)] for row, t in zip(rows, together, strict=True)]
        noise = 0.0 if exact is None else self.ranks.largest(largest_gap(self.alone, exact.alone))
        gap = self.ranks.fault(difference(alone, together, noise))
        return gap and f"{gap} in a batch"

    @property
    def keeps_positions(self) -> bool:
        """Whether every layer keeps the keys and values of all positions."""
        leaves = cache_leaves(self._prefilled[0])
        has_positions = all(class_of(leaf).keeps_positions for leaf in leaves)
        return self.ranks.fault(None if has_positions else "not every position is kept") is None

    def overhead(self) -> float:
        """Return the cost of one more group of rows, in positions of a row."""
        leaves = cache_leaves(self._prefilled[0])
        used = ((class_of(leaf).pair, leaf) for leaf in leaves if not leaf.empty())
        like = next((pair(leaf) for pair, leaf in used if pair), None)
        return self.ranks.largest(0.0 if like is None else measured_overhead(*like))

    def _padding_fault(self) -> str | None:
        padded = (
            leaf
            for leaf in cache_leaves(self._prefilled[0])
            if class_of(leaf).keeps_positions and class_of(leaf).form is None
        )
        return next((f"{type(leaf).__name__} pads its rows" for leaf in padded), None)

    def _merge_fault(self) -> str | None:
        missing = (leaf for leaf in self._prefilled[0] if not hasattr(leaf, "merge"))
        return next((f"{type(leaf).__name__} cannot be merged" for leaf in missing), None)

    def _computed_alone(self) -> Pieces[list[mx.array]]:
        """Return the logits [S, V] of each row alone."""
        rows = zip(deepcopy(self._prefilled), self._tokens, self._lengths, strict=True)
        logits = []
        for caches, tokens, n in rows:
            steps = []
            for token_id in tokens[n:][:_COMPARED_TOKENS]:
                steps.append(self.stepped(caches, token_id))
                yield
            logits.append(mx.concatenate(steps))
        return logits

    def fed(self, caches: Caches, tokens: Sequence[int]) -> Pieces[Caches]:
        """Append tokens to caches, and return the caches."""
        return prefilled(self.ranks, self.network, caches, tokens)

    def stepped(self, caches: Caches, token_id: int) -> mx.array:
        """Append a token to caches, and return the logits [1, V] after it."""
        return computed(self.ranks, lambda: self.network(mx.array([[token_id]]), cache=caches)[0])

    def _together(self, plan: BatchPlan, width: int, rows: Sequence[int]) -> Pieces[list[mx.array]]:
        """Return the logits [S, V] of rows in one batch."""
        caches = BatchCaches(plan)
        prefilled_rows = deepcopy([self._prefilled[row] for row in rows])
        self.ranks.attempt(lambda: caches.regroup([], prefilled_rows))
        fed = [self._lengths[row] for row in rows]
        logits: list[list[mx.array]] = [[] for _ in rows]
        for step in range(_STEPS if width == 1 else _WIDE_PASSES):
            counts, kept = _taken(caches, len(rows), width, step)
            inputs = [
                cut(self._tokens[row][n:][:count], 0, count)
                for row, n, count in zip(rows, fed, counts, strict=True)
            ]
            made = computed(self.ranks, partial(caches.take, self.network, inputs))
            self.ranks.attempt(partial(caches.keep, kept))
            firsts = accumulate(counts, initial=0)
            for place, (first, count) in enumerate(zip(firsts, kept, strict=False)):
                logits[place].append(made[first : first + count])
                fed[place] += count
            yield
        return [mx.concatenate(row)[:_COMPARED_TOKENS] for row in logits]


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
