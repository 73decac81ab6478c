"""Decides how many drafted tokens a pass of a batch takes."""

import logging
from collections.abc import Mapping, Sequence
from math import ceil, prod
from typing import NamedTuple

from backend.config import SpeculationOptions
from backend.engine.drafts.costs import PassCosts
from backend.engine.drafts.draft_model import DraftModel, ModelSource
from backend.engine.drafts.drafter import FIRST_CHANCES, Draft, Drafter, Source
from backend.engine.drafts.trust import Trust
from backend.engine.network import MODEL_ERRORS
from backend.engine.rows.counters import Counters
from backend.engine.rows.row import Row

SOURCES: Mapping[str, Sequence[Source]] = {
    "auto": tuple(Source),
    "lookup": (Source.MATCH, Source.LONG_MATCH),
    "draft": (Source.MODEL,),
    "mtp": (Source.MODEL,),
    "off": (),
}
"""The sources that draft, by the option `speculation`."""

# The factor by which the rate of tokens must grow: measured times are not exact.
_LEAST_GAIN = 1.2
# The share of all time spent on drafts that only show whether they would pay.
_TRIAL_SHARE = 0.01
_TRIAL_TOKENS = 3
# For all rows together: each token has logits as wide as the vocabulary.
_MAX_PASS_TOKENS = 128
# The weight of a row's latest draft in the initial trust of the next row; for a draft model it is
# larger, as nearly all rows agree.
_PRIOR_SHARE, _MODEL_PRIOR_SHARE = 0.1, 0.5
# A row is expected to draw as many tokens again as it has drawn, and at least this many.
_LIKELY_TOKENS = 64
# Reading a row may take this share of the time that a draft model is expected to save for it.
_READING_SHARE = 0.5
# While a draft model reads, rows wait for at most the time of this many passes.
_READING_PASSES = 4

log = logging.getLogger(__name__)


class _Offer(NamedTuple):
    """The length of a draft, found or yet to be written by a draft model, and the trust in it."""

    length: int
    trust: Trust


class _Plan(NamedTuple):
    """The number of tokens of each draft in a pass, and the tokens per second to expect."""

    depth: int
    rate: float
    writing: Sequence[Row] = ()


class Drafting:
    """Decides which drafts are fed with the latest tokens of the rows of a batch."""

    def __init__(
        self,
        costs: PassCosts,
        counters: Counters,
        vocab_size: int,
        options: SpeculationOptions,
        model: DraftModel | None = None,
    ) -> None:
        """Start without rows.

        Args:
            costs: The cost of passes.
            counters: Count drafted tokens.
            vocab_size: The vocabulary size of the model.
            options: The sources that draft, and their limit.
            model: Drafts for rows whose text and grammar predict nothing.
        """
        self.costs = costs
        self._counters = counters
        self._vocab_size = vocab_size
        self._max_tokens = options.max_draft_tokens
        self._source = ModelSource(model) if model else None
        self._rows: Sequence[Row] = ()
        self._drafters: dict[Row, Drafter] = {}
        self._offered: dict[Row, Draft] = {}
        self._trial_s = 0.0
        self._keeps_parts = True
        self._chances = {source: FIRST_CHANCES[source] for source in SOURCES[options.speculation]}
        if model is None:
            self._chances.pop(Source.MODEL, None)

    @property
    def nbytes(self) -> int:
        """Size of the caches of the draft model."""
        return self._source.model.nbytes if self._source else 0

    def follow(self, rows: Sequence[Row]) -> None:
        """Update the rows of the batch, after some have left or joined."""
        known, self._rows = self._drafters, rows
        self._drafters = {
            row: known.get(row) or Drafter(row, self._vocab_size, self._chances)
            for row in rows
            if row.request.may_speculate
        }
        if self._source is not None:
            self._source.model.follow(list(self._drafters))

    def see(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """Handle a dispatched pass of the model.

        Args:
            rows: The rows of the pass; the tokens that they keep count as fed.
            counts: The number of its tokens that each row keeps.
        """
        if self._source is not None:
            self._source.model.see(rows, counts)

    @property
    def may_draft(self) -> bool:
        """Whether it is worthwhile to read the tokens in flight first, and to look for drafts."""
        tries = self._may_try
        return any(drafter.may_draft(tries=tries) for drafter in self._active().values())

    def drafts(self, *, keeps_parts: bool = True) -> list[tuple[int, ...]]:
        """Return the drafted tokens of each row, whose tokens have all been read.

        Args:
            keeps_parts: Whether a row may keep only some of the tokens that it feeds. If not, the
                right tokens of a partly wrong draft are fed again in the next pass.
        """
        self._keeps_parts = keeps_parts
        limit = min(self._max_tokens, _MAX_PASS_TOKENS // len(self._rows) - 1)
        drafters = {row: each for row, each in self._active().items() if row.unfed == 1}
        tries = self._may_try
        proposed = ((row, each.propose(limit, tries=tries)) for row, each in drafters.items())
        found = {row: draft for row, draft in proposed if draft}
        writable = {
            row: _Offer(length, drafter.model_trust)
            for row, drafter in drafters.items()
            if (length := drafter.writable(limit, found.get(row)))
        }
        plan = self._chosen(found, self._read(writable))
        self._offered = {
            **{row: d._replace(tokens=d.tokens[: plan.depth]) for row, d in found.items()},
            **self._written(plan),
        }
        return [self._offered[row].tokens if row in self._offered else () for row in self._rows]

    def learn(self, accepted: Sequence[int]) -> None:
        """Learn how many tokens of each row's draft were right."""
        for row, count in zip(self._rows, accepted, strict=True):
            if draft := self._offered.get(row):
                self._learn(row, draft, count)
                self._counters.count_draft(len(draft.tokens), count)

    def observe(self, rows: int, width: int, seconds: float) -> None:
        """Learn the seconds of a pass over `rows` rows of `width` tokens."""
        self.costs.observe(rows, width, seconds)
        self._trial_s += _TRIAL_SHARE * seconds

    @property
    def _may_try(self) -> bool:
        """Whether there is time for drafts that did not pay recently."""
        return self._trial_price(len(self._drafters) if self._source else 0) <= self._trial_s

    def _active(self) -> Mapping[Row, Drafter]:
        """Return the drafters that may draft now; none if a pass without drafts is due."""
        return {} if self.costs.wants_plain(len(self._rows)) else self._drafters

    def _learn(self, row: Row, draft: Draft, right: int) -> None:
        draft.trust.learn(len(draft.tokens) + draft.is_cut, right, row.drawn)
        chance = self._chances[draft.source]
        share = _MODEL_PRIOR_SHARE if draft.source is Source.MODEL else _PRIOR_SHARE
        self._chances[draft.source] += share * (draft.trust.chance - chance)

    def _chosen(self, found: dict[Row, Draft], ready: Mapping[Row, _Offer]) -> _Plan:
        """Plan a pass, and remove the drafts that it does not take from `found`.

        Args:
            found: Drafts already found.
            ready: Rows for which a draft model may write a draft.
        """
        offers = {row: _Offer(len(draft.tokens), draft.trust) for row, draft in found.items()}
        plain = plan = self._best(offers)
        if ready:
            plan = max(plain, self._best({**offers, **ready}, list(ready)), key=lambda p: p.rate)
        for offer in offers.values():
            offer.trust.pays = plan.depth > 0
        for offer in ready.values():
            offer.trust.pays = plan.depth > 0 and bool(plan.writing)
        if plan.depth == 0:
            plan = self._trial(offers, ready)
            offers = {row: o for row, o in offers.items() if o.trust.wants_trial(row.drawn)}
        for row in list(found):
            if plan.depth == 0 or row not in offers or row in plan.writing:
                del found[row]
        return plan

    def _trial(self, offers: Mapping[Row, _Offer], ready: Mapping[Row, _Offer]) -> _Plan:
        """Return a pass that only measures whether drafts would pay, if one is due."""
        wanting = [
            (row, offer)
            for row, offer in (*offers.items(), *ready.items())
            if offer.trust.wants_trial(row.drawn)
        ]
        writing = [row for row, _ in wanting if row in ready]
        if wanting and self._affords(self._trial_price(len(writing))):
            return _Plan(_TRIAL_TOKENS, 0.0, writing)
        for row in writing:
            ready[row].trust.rest(row.drawn)
        return _Plan(0, 0.0)

    def _affords(self, price_s: float) -> bool:
        """Take a time from the reserve for trials, if it is large enough."""
        if price_s > self._trial_s:
            return False
        self._trial_s -= price_s
        return True

    def _trial_price(self, writing: int) -> float:
        """Return the seconds of a trial in which the draft model writes for `writing` rows."""
        rows = len(self._rows)
        own_s = self.costs.of(rows, 1 + _TRIAL_TOKENS) - self.costs.of(rows, 1)
        if not writing or self._source is None:
            return own_s
        return own_s + _TRIAL_TOKENS * self._source.model.costs.of(writing, 1)

    def _best(self, offers: Mapping[Row, _Offer], writing: Sequence[Row] = ()) -> _Plan:
        """Return the plan with the most tokens per second; its depth is 0 if no draft helps.

        Args:
            offers: The offer of each row that has one.
            writing: The rows whose drafts a draft model has yet to write.
        """
        rows = len(self._rows)
        first_s, next_s = self._source.writing_s(writing) if writing and self._source else (0, 0)
        best = _Plan(0, _LEAST_GAIN * rows / self.costs.of(rows, 1))
        for depth in range(1, max((offer.length for offer in offers.values()), default=0) + 1):
            cut = [_Offer(min(offer.length, depth), offer.trust) for offer in offers.values()]
            expected = sum(offer.trust.expected(offer.length) for offer in cut)
            seconds = self.costs.of(rows, 1 + depth) + first_s + (depth - 1) * next_s
            if not self._keeps_parts:
                seconds += self._repeating_s(cut)
            rate = (rows + expected) / seconds
            if rate > best.rate:
                best = _Plan(depth, rate, writing)
        return best

    def _repeating_s(self, offers: Sequence[_Offer]) -> float:
        """Return the mean seconds to feed the right tokens of partly wrong drafts again."""
        all_right = prod(offer.trust.chance**offer.length for offer in offers)
        longest = max(offer.trust.expected(offer.length) for offer in offers)
        rows = len(self._rows)
        return (1.0 - all_right) * (self.costs.of(rows, 2 + ceil(longest)) - self.costs.of(rows, 1))

    def _read(self, writable: Mapping[Row, _Offer]) -> Mapping[Row, _Offer]:
        """Return the rows that the draft model has read; let it read a part of another."""
        if self._source is None:
            return {}
        ready = {row: o for row, o in writable.items() if self._source.is_ready(row)}
        behind = {row: o for row, o in writable.items() if row not in ready}
        if behind:
            self._read_on(self._source, behind)
        return ready

    def _read_on(self, source: ModelSource, behind: Mapping[Row, _Offer]) -> None:
        """Let the draft model read a part of one row, if that is likely to pay."""
        trusts = {row: offer.trust for row, offer in behind.items()}
        willing = [row for row, t in trusts.items() if t.pays or t.wants_trial(row.drawn)]
        if not willing:
            return
        row = min(willing, key=source.model.unread)
        trust, price_s = trusts[row], source.reading_s(row)
        trust.pays = price_s <= _READING_SHARE * self._saving_s(row, behind)
        plain_s = self.costs.of(len(self._rows), 1)
        if not trust.pays and not self._may_read(price_s):
            trust.rest(row.drawn)
            return
        try:
            read_s = source.read_on(row, _READING_PASSES * plain_s)
        except MODEL_ERRORS as error:
            self._lose_model(error)
            return
        if not trust.pays:
            self._trial_s -= read_s

    def _may_read(self, price_s: float) -> bool:
        """Tell whether there is time to read a row and to try it afterwards."""
        return price_s + self._trial_price(1) <= self._trial_s

    def _saving_s(self, row: Row, behind: Mapping[Row, _Offer]) -> float:
        """Return the seconds that drafts are likely to save until an unread row ends."""
        plan = self._best(behind, list(behind))
        if plan.depth == 0:
            return 0.0
        rows = len(self._rows)
        left = min(row.request.max_tokens - row.drawn, max(row.drawn, _LIKELY_TOKENS))
        return (self.costs.of(rows, 1) - rows / plan.rate) * left / len(behind)

    def _written(self, plan: _Plan) -> Mapping[Row, Draft]:
        """Return the draft model's drafts, each up to the first token that cannot be right."""
        if not plan.writing or self._source is None:
            return {}
        try:
            texts = self._source.write(plan.writing, plan.depth)
        except MODEL_ERRORS as error:
            self._lose_model(error)
            return {}
        drafts = {row: self._drafters[row].written(tokens) for row, tokens in texts.items()}
        for row, draft in drafts.items():
            if not draft.tokens:
                self._learn(row, draft, 0)
        return {row: draft for row, draft in drafts.items() if draft.tokens}

    def _lose_model(self, error: Exception) -> None:
        """Continue without the draft model: no reply depends on it."""
        log.warning("the draft model fails, and drafts no more", exc_info=error)
        self._source = None
        self._chances.pop(Source.MODEL, None)
        for drafter in self._drafters.values():
            drafter.leave_out(Source.MODEL)
