"""The number of drafted tokens that promises the most tokens per second."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple

from backend.engine.drafts.costs import PassCosts
from backend.engine.drafts.draft_model import ModelSource
from backend.engine.drafts.sources import Source
from backend.engine.drafts.trust import Trust
from backend.engine.rows.row import Row

TRIAL_TOKENS = 3
# The factor by which the rate of tokens must grow: measured times are not exact.
_LEAST_GAIN = 1.2


class Offer(NamedTuple):
    """The length of a draft, found or yet to be written by a draft model, and the trust in it."""

    length: int
    source: Source
    trust: Trust


class Plan(NamedTuple):
    """The number of tokens of each draft in a pass, and the tokens per second to expect."""

    depth: int
    rate: float = 0.0
    writing: Sequence[Row] = ()


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of the next pass.

    Attributes:
        costs: The seconds of passes.
        model: A draft model, if there is one.
        rows: The rows of the pass, at least one.
        keeps_parts: Whether a row may keep only some of the tokens that it feeds.
    """

    costs: PassCosts
    model: ModelSource | None
    rows: int
    keeps_parts: bool

    @property
    def plain_s(self) -> float:
        """The seconds of a pass without drafts."""
        return self.costs.of(self.rows, 1)

    def trial_s(self, writing: int) -> float:
        """Return the seconds of a trial in which the draft model writes for `writing` rows."""
        own_s = self.costs.of(self.rows, 1 + TRIAL_TOKENS) - self.plain_s
        if not writing or self.model is None:
            return own_s
        return own_s + TRIAL_TOKENS * self.model.model.costs.of(writing, 1)

    def writing_s(self, writing: Sequence[Row]) -> tuple[float, float]:
        """Return the seconds of the draft model's first token for some rows, and of each later."""
        return self.model.writing_s(writing) if writing and self.model else (0.0, 0.0)

    def best(self, offers: Sequence[Offer], writing: Sequence[Row] = ()) -> Plan:
        """Return the plan with the most tokens per second; its depth is 0 if no draft helps.

        Args:
            offers: The offers of the rows that have one.
            writing: The rows whose drafts the draft model has yet to write.
        """
        first_s, next_s = self.writing_s(writing)
        best = Plan(0, _LEAST_GAIN * self.rows / self.plain_s)
        for depth in range(1, max((offer.length for offer in offers), default=0) + 1):
            rate = self._rate(offers, depth, first_s + (depth - 1) * next_s)
            if rate > best.rate:
                best = Plan(depth, rate, writing)
        return best

    def _rate(self, offers: Sequence[Offer], depth: int, writing_s: float) -> float:
        """Return the tokens per second of a pass that takes `depth` tokens of each draft."""
        cut = [offer._replace(length=min(offer.length, depth)) for offer in offers]
        expected = sum(offer.trust.expected(offer.length) for offer in cut)
        seconds = self.costs.of(self.rows, 1 + depth) + writing_s
        if not self.keeps_parts:
            seconds += self._repeating_s(cut)
        return (self.rows + expected) / seconds

    def _repeating_s(self, offers: Sequence[Offer]) -> float:
        """Return the mean seconds to feed the right tokens of partly wrong drafts again."""
        all_right = prod(offer.trust.chance**offer.length for offer in offers)
        longest = max(offer.trust.expected(offer.length) for offer in offers)
        again_s = self.costs.of(self.rows, 2 + ceil(longest)) - self.plain_s
        return (1.0 - all_right) * again_s
