"""Decides how many drafted tokens a pass of a batch takes."""

import logging
from collections.abc import Mapping, Sequence

from backend.config import SpeculationOptions
from backend.engine.drafts.drafter import Draft, Drafter
from backend.engine.drafts.pricing import (
    FIRST_CHANCES,
    MAX_PASS_TOKENS,
    SOURCES,
    TRIAL_TOKENS,
    Budget,
    ByRow,
    Company,
    DraftModel,
    Leave,
    ModelSource,
    Offer,
    PassCosts,
    Plan,
    Prices,
    Source,
)
from backend.engine.plan import MODEL_ERRORS
from backend.engine.rows.pacing import Counters
from backend.engine.rows.row import Row

# The weight of a row's latest draft in the initial trust of the next row; for a draft model it is
# larger, as nearly all rows agree.
_PRIOR_SHARE, _MODEL_PRIOR_SHARE = 0.1, 0.5
# A row is expected to draw as many tokens again as it has drawn, and at least this many.
_LIKELY_TOKENS = 64
# Reading a row may take this share of the time that a draft model is expected to save for it.
_READING_SHARE = 0.5
# The sources that may draft are chosen again if the time of a pass differs by this share.
_LEAVE_SHARE = 0.05
# While a draft model reads, rows wait for at most the time of this many passes.
_READING_PASSES = 4

log = logging.getLogger(__name__)


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
        self.costs = costs
        self._counters = counters
        self._vocab_size = vocab_size
        self._max_tokens = options.max_draft_tokens
        self.source = ModelSource(model) if model else None
        self._rows: Sequence[Row] = ()
        self._drafters: dict[Row, Drafter] = {}
        self._offered: dict[Row, Draft] = {}
        self._asked: Source | None = None
        self._keeps_parts, self._packs = True, False
        self._chances = {source: FIRST_CHANCES[source] for source in SOURCES[options.speculation]}
        if model is None:
            self._chances.pop(Source.MODEL, None)
        self._budget = Budget(self._chances)
        self._leave: Leave | None = None
        self._prices: Prices | None = None
        self._leave_s = 0.0

    @property
    def nbytes(self) -> int:
        """Size of the caches of the draft model."""
        return self.source.model.nbytes if self.source else 0

    def join(self, company: Company) -> None:
        """Draft for the rows of a batch."""
        if self.source is not None:
            self.source.model.join(company)

    def follow(self, rows: Sequence[Row]) -> None:
        """Update the rows of the batch, after some have left or joined."""
        known, self._rows, self._leave, self._prices = self._drafters, rows, None, None
        self._drafters = {
            row: known.get(row) or Drafter(row, self._vocab_size, self._chances)
            for row in rows
            if row.params.may_speculate
        }
        self._budget.follow(self._drafters.keys())
        if self.source is not None:
            self.source.model.follow(list(self._drafters))

    def see(
        self, rows: Sequence[Row], counts: Sequence[int], by_row: ByRow = lambda array: array
    ) -> None:
        """Handle a dispatched pass of the model.

        Args:
            rows: The rows of the pass; the tokens that they keep count as fed.
            by_row: Returns an output of a module in the pass as [B, T, n].
        """
        if self.source is not None:
            self.source.model.see(rows, counts, by_row)

    @property
    def may_draft(self) -> bool:
        """Whether it is worthwhile to read the tokens in flight first, and to look for drafts."""
        leave = self._current_leave()
        likely = (drafter.likely(leave) for drafter in self._active().values())
        asked = next(filter(None, likely), None)
        self._asked = asked or self._asked
        return asked is not None

    def drafts(self, *, keeps_parts: bool = True, packs: bool = False) -> list[tuple[int, ...]]:
        """Return the drafted tokens of each row, whose tokens have all been read.

        Args:
            keeps_parts: Whether a row may keep only some of the tokens that it feeds. If not, the
                right tokens of a partly wrong draft are fed again in the next pass.
            packs: Whether rows are not padded to the longest draft.
        """
        if (keeps_parts, packs) != (self._keeps_parts, self._packs):
            self._keeps_parts, self._packs = keeps_parts, packs
            self._leave = self._prices = None
        limit = min(self._max_tokens, self._most_tokens)
        drafters = {row: each for row, each in self._active().items() if row.unfed == 1}
        leave = self._current_leave()
        proposed = ((row, each.propose(limit, leave)) for row, each in drafters.items())
        found = {row: draft for row, draft in proposed if draft}
        most = self.source.model.most_tokens if self.source else 0
        writable = {
            row: Offer(length, Source.MODEL, drafter.model_trust)
            for row, drafter in drafters.items()
            if (length := drafter.writable(min(limit, most), found.get(row), leave))
        }
        plan = self._chosen(found, self._read(writable), leave)
        self._offered = {
            **{row: d._replace(tokens=d.tokens[: plan.depths[row]]) for row, d in found.items()},
            **self._written(plan),
        }
        return [self._offered[row].tokens if row in self._offered else () for row in self._rows]

    def learn(self, accepted: Sequence[int]) -> None:
        """Learn how many tokens of each row's draft were right."""
        for row, count in zip(self._rows, accepted, strict=True):
            if draft := self._offered.get(row):
                self._learn(row, draft, count)
                self._budget.count(draft.source, len(draft.tokens), count)
                self._counters.add("drafted_tokens", len(draft.tokens))
                self._counters.add("accepted_tokens", count)

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        """Learn the seconds of a pass over `tokens` tokens of `rows` rows together."""
        if tokens == rows:
            self._asked = None
        self.costs.observe(rows, tokens, seconds)
        self._prices = None
        plain_s = self.costs.of(rows, rows)
        has_earned = self._budget.earn(seconds / plain_s)
        has_changed = abs(plain_s - self._leave_s) > _LEAVE_SHARE * plain_s
        if has_earned or has_changed or tokens > rows:
            self._leave = None

    def settle(self, seconds: float, passes: int) -> None:
        """Handle the end of a step that did not let the next pass follow the one in flight.

        Args:
            passes: Its rows got the tokens of so many passes without drafts, and accepted ones.
        """
        plain_s, rows = self._current_prices().plain_s, len(self._rows)
        self._budget.settle(seconds, passes, plain_s, rows, self._asked)
        self._leave = None

    def _current_prices(self) -> Prices:
        """Return the prices of the next pass, as of the latest one."""
        if self._prices is None:
            rows = max(len(self._rows), 1)
            ways = self._keeps_parts, self._packs
            self._prices = Prices(self.costs, self.source, rows, *ways)
        return self._prices

    @property
    def _most_tokens(self) -> int:
        """The most tokens that may be drafted for one row."""
        rows = len(self._rows)
        return MAX_PASS_TOKENS - rows if self._packs else MAX_PASS_TOKENS // rows - 1

    def _current_leave(self) -> Leave:
        """Return the sources that may draft now, as of the latest look."""
        if self._leave is None:
            prices, writing = self._current_prices(), len(self._drafters)
            plain_s = self._leave_s = prices.plain_s
            own, model = prices.trial_s(0) / plain_s, prices.trial_s(writing) / plain_s
            self._leave = self._budget.leave(own, model)
        return self._leave

    def _active(self) -> Mapping[Row, Drafter]:
        """Return the drafters that may draft now; none if a pass without drafts is due."""
        return {} if self.costs.wants_plain(len(self._rows)) else self._drafters

    def _learn(self, row: Row, draft: Draft, right: int) -> None:
        draft.trust.learn(len(draft.tokens) + draft.is_cut, right, row.drawn)
        chance = self._chances[draft.source]
        share = _MODEL_PRIOR_SHARE if draft.source is Source.MODEL else _PRIOR_SHARE
        self._chances[draft.source] += share * (draft.trust.chance - chance)

    def _chosen(self, found: dict[Row, Draft], ready: Mapping[Row, Offer], leave: Leave) -> Plan:
        """Plan a pass, and remove the drafts that it does not take from `found`.

        Args:
            ready: Rows for which a draft model may write a draft.
            leave: The sources that may draft.
        """
        prices = self._current_prices()
        offers = {row: Offer(len(d.tokens), d.source, d.trust) for row, d in found.items()}
        plan = prices.best(offers)
        if ready:
            both = prices.best({**offers, **ready}, list(ready))
            plan = max(plan, both, key=lambda p: p.rate)
        for row, offer in offers.items():
            offer.trust.pays = row in plan.depths
        for row, offer in ready.items():
            offer.trust.pays = row in plan.depths and bool(plan.writing)
        if not plan.depths:
            plan = _trial({**offers, **ready}, list(ready), leave)
        for row in list(found):
            if row not in plan.depths or row in plan.writing:
                del found[row]
        if plan.depths:
            writing_s = prices.writing_s(plan)
            self._budget.expect(prices.wider_s(plan) + writing_s, writing_s)
        return plan

    def _read(self, writable: Mapping[Row, Offer]) -> Mapping[Row, Offer]:
        """Return the rows that the draft model has read; let it read a part of another."""
        if self.source is None:
            return {}
        ready = {row: o for row, o in writable.items() if self.source.is_ready(row)}
        behind = {row: o for row, o in writable.items() if row not in ready}
        if behind:
            self._read_on(self.source, behind)
        return ready

    def _read_on(self, source: ModelSource, behind: Mapping[Row, Offer]) -> None:
        """Let the draft model read a part of one row, if that is likely to pay."""
        trusts = {row: offer.trust for row, offer in behind.items()}
        willing = [row for row, t in trusts.items() if t.pays or t.wants_trial(row.drawn)]
        if not willing:
            return
        row = min(willing, key=source.model.unread)
        trust, price_s = trusts[row], source.reading_s(row)
        trust.pays = price_s <= _READING_SHARE * self._saving_s(row, behind)
        plain_s = self._current_prices().plain_s
        if not trust.pays and not self._may_read(price_s):
            trust.rest(row.drawn)
            return
        try:
            read_s = source.read_on(row, _READING_PASSES * plain_s)
        except MODEL_ERRORS as error:
            self._lose_model(error)
            return
        if trust.pays:
            # A longer time is a delay by something else.
            self._budget.lend(row, min(read_s, 2.0 * price_s), plain_s)
        else:
            self._budget.expect(read_s, read_s)

    def _may_read(self, price_s: float) -> bool:
        """Tell whether there is time to read a row and to try it afterwards."""
        prices = self._current_prices()
        is_soon = price_s <= self._budget.left(Source.MODEL) * prices.plain_s
        return is_soon and self._budget.affords(Source.MODEL, prices.trial_s(1) / prices.plain_s)

    def _saving_s(self, row: Row, behind: Mapping[Row, Offer]) -> float:
        """Return the seconds that drafts are likely to save until an unread row ends."""
        prices = self._current_prices()
        plan = prices.best(behind, list(behind))
        if not plan.depths:
            return 0.0
        left = min(row.max_tokens - row.drawn, max(row.drawn, _LIKELY_TOKENS))
        return (prices.plain_s - prices.rows / plan.rate) * left / len(behind)

    def _written(self, plan: Plan) -> Mapping[Row, Draft]:
        """Return the draft model's drafts, each up to the first token that cannot be right."""
        if not plan.written_depth or self.source is None:
            return {}
        try:
            texts = self.source.write(plan.writing, plan.written_depth)
        except MODEL_ERRORS as error:
            self._lose_model(error)
            return {}
        drafts = {
            row: self._drafters[row].written(texts[row][:depth])
            for row, depth in plan.depths.items()
            if row in texts
        }
        for row, draft in drafts.items():
            if not draft.tokens:
                self._learn(row, draft, 0)
        return {row: draft for row, draft in drafts.items() if draft.tokens}

    def _lose_model(self, error: Exception) -> None:
        """Continue without the draft model: no reply depends on it."""
        log.warning("the draft model fails, and drafts no more", exc_info=error)
        self.source = self._leave = self._prices = None
        self._chances.pop(Source.MODEL, None)
        for drafter in self._drafters.values():
            drafter.leave_out(Source.MODEL)


def _trial(offers: Mapping[Row, Offer], ready: Sequence[Row], leave: Leave) -> Plan:
    """Return a pass that only measures whether drafts would pay, if one is due.

    All rows take part if one is due: the pass is wide anyway.
    """
    able = {row: offer for row, offer in offers.items() if offer.source in leave.trials}
    if any(offer.trust.wants_trial(row.drawn) for row, offer in able.items()):
        depths = {row: min(TRIAL_TOKENS, offer.length) for row, offer in able.items()}
        return Plan(depths, writing=[row for row in ready if row in able])
    return Plan({})
