"""How many drafted tokens a pass of a batch takes."""

from collections.abc import Mapping, Sequence
from math import ceil, prod

from backend.config import SpeculationOptions
from backend.engine.drafts.costs import PassCosts
from backend.engine.drafts.drafter import FIRST_CHANCES, Draft, Drafter
from backend.engine.rows.counters import Counters
from backend.engine.rows.row import Row

# By how much the rate of tokens has to grow: what is measured is not exact.
_LEAST_GAIN = 1.2
# Of all time, for drafts that only show whether they would pay.
_TRIAL_SHARE = 0.01
_TRIAL_TOKENS = 3
# Of all rows together: each has logits of its own, as wide as the vocabulary.
_MAX_PASS_TOKENS = 128
# Of a row's latest draft in what the next row begins with.
_PRIOR_SHARE = 0.1


class Drafting:
    """Decides for the rows of a batch which drafts are computed with their latest tokens."""

    def __init__(
        self,
        costs: PassCosts,
        counters: Counters,
        vocab_size: int,
        options: SpeculationOptions,
    ) -> None:
        """Start without rows.

        Args:
            costs: What passes cost.
            counters: Count drafted tokens.
            vocab_size: Of the model.
            options: Which sources draft, and how much.
        """
        self.costs = costs
        self._counters = counters
        self._vocab_size = vocab_size
        self._max_tokens = options.max_draft_tokens
        self._forces = options.speculation == "auto"
        self._rows: Sequence[Row] = ()
        self._drafters: dict[Row, Drafter] = {}
        self._offered: dict[Row, Draft] = {}
        self._trial_s = 0.0
        self._chances = dict(FIRST_CHANCES)

    def follow(self, rows: Sequence[Row]) -> None:
        """Take the rows of the batch, after some have left or joined."""
        known, self._rows = self._drafters, rows
        self._drafters = {
            row: known.get(row) or self._new_drafter(row)
            for row in rows
            if row.request.may_speculate
        }

    @property
    def may_draft(self) -> bool:
        """Whether it is worth while to read the tokens in flight first, and to look for drafts."""
        tries = self._trial_price() <= self._trial_s
        return any(drafter.may_draft(tries=tries) for drafter in self._active().values())

    def drafts(self, *, keeps_parts: bool = True) -> list[tuple[int, ...]]:
        """Return the drafted tokens of each row, whose tokens have all been read.

        Args:
            keeps_parts: Whether a row may keep a part of what it feeds. Else what is right of a
                draft that is not all right has to be fed again, with the next pass.
        """
        limit = min(self._max_tokens, _MAX_PASS_TOKENS // len(self._rows) - 1)
        found = {
            row: draft
            for row, drafter in self._active().items()
            if row.unfed == 1 and (draft := drafter.propose(limit))
        }
        depth = self._best_depth(list(found.values()), keeps_parts=keeps_parts)
        for draft in found.values():
            draft.trust.pays = depth > 0
        if depth == 0:
            found = {row: d for row, d in found.items() if d.trust.wants_trial(row.drawn)}
            depth = _TRIAL_TOKENS if found and self._affords_trial() else 0
        self._offered = {row: d._replace(tokens=d.tokens[:depth]) for row, d in found.items()}
        return [self._offered[row].tokens if row in self._offered else () for row in self._rows]

    def learn(self, accepted: Sequence[int]) -> None:
        """Learn how many tokens of the draft of each row were right."""
        for row, count in zip(self._rows, accepted, strict=True):
            if draft := self._offered.get(row):
                draft.trust.learn(len(draft.tokens), count, row.drawn)
                chance = self._chances[draft.source]
                self._chances[draft.source] += _PRIOR_SHARE * (draft.trust.chance - chance)
                self._counters.count_draft(len(draft.tokens), count)

    def observe(self, rows: int, width: int, seconds: float) -> None:
        """Learn what a pass took over `rows` rows of `width` tokens."""
        self.costs.observe(rows, width, seconds)
        self._trial_s += _TRIAL_SHARE * seconds

    def _active(self) -> Mapping[Row, Drafter]:
        """Return the drafters that may draft now: none when a pass without drafts is due."""
        return {} if self.costs.wants_plain(len(self._rows)) else self._drafters

    def _new_drafter(self, row: Row) -> Drafter:
        return Drafter(row, self._vocab_size, self._chances, forces=self._forces)

    def _affords_trial(self) -> bool:
        """Take the time for a trial out of what has been put by for it, if there is enough."""
        price = self._trial_price()
        if price > self._trial_s:
            return False
        self._trial_s -= price
        return True

    def _trial_price(self) -> float:
        rows = len(self._rows)
        return self.costs.of(rows, 1 + _TRIAL_TOKENS) - self.costs.of(rows, 1)

    def _best_depth(self, drafts: Sequence[Draft], *, keeps_parts: bool) -> int:
        """Return how much of each draft gives the most tokens per second; 0 is no gain at all."""
        rows = len(self._rows)
        best, best_rate = 0, _LEAST_GAIN * rows / self.costs.of(rows, 1)
        for depth in range(1, max((len(draft.tokens) for draft in drafts), default=0) + 1):
            offered = [d._replace(tokens=d.tokens[:depth]) for d in drafts]
            expected = sum(d.trust.expected(len(d.tokens)) for d in offered)
            seconds = self.costs.of(rows, 1 + depth)
            if not keeps_parts:
                seconds += self._repeating_s(offered)
            rate = (rows + expected) / seconds
            if rate > best_rate:
                best, best_rate = depth, rate
        return best

    def _repeating_s(self, drafts: Sequence[Draft]) -> float:
        """Return what it takes on average to feed again what was right of drafts that were not."""
        all_right = prod(draft.trust.chance ** len(draft.tokens) for draft in drafts)
        longest = max(draft.trust.expected(len(draft.tokens)) for draft in drafts)
        rows = len(self._rows)
        return (1.0 - all_right) * (self.costs.of(rows, 2 + ceil(longest)) - self.costs.of(rows, 1))
