"""The number of drafted tokens that promises the most tokens per second."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple, TypeAlias

from backend.engine.drafts.costs import PassCosts
from backend.engine.drafts.draft_model import ModelSource
from backend.engine.drafts.sources import Source
from backend.engine.drafts.trust import Trust
from backend.engine.rows.row import Row

_Seconds: TypeAlias = tuple[float, float]

TRIAL_TOKENS = 3
# Of all rows together: each token has logits as wide as the vocabulary.
MAX_PASS_TOKENS = 128
# The factor by which the rate of tokens must grow: measured times are not exact.
_LEAST_GAIN = 1.2
# A token that is less likely to be right is not added to a draft.
_LEAST_CHANCE = 0.05


class Offer(NamedTuple):
    """The length of a draft, found or yet to be written by a draft model, and the trust in it."""

    length: int
    source: Source
    trust: Trust


class Plan(NamedTuple):
    """The drafts of a pass.

    Attributes:
        depths: The number of drafted tokens of each row that has any.
        rate: The tokens per second to expect.
        writing: The rows whose drafts the draft model has yet to write.
    """

    depths: Mapping[Row, int]
    rate: float = 0.0
    writing: Sequence[Row] = ()

    @property
    def written_depth(self) -> int:
        """The number of tokens that the draft model writes for each of its rows."""
        return max((self.depths.get(row, 0) for row in self.writing), default=0)


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of the next pass.

    Attributes:
        costs: The seconds of passes.
        model: A draft model, if there is one.
        rows: The rows of the pass, at least one.
        keeps_parts: Whether a row may keep only some of the tokens that it feeds.
        packs: Whether rows are not padded to the longest draft.
    """

    costs: PassCosts
    model: ModelSource | None
    rows: int
    keeps_parts: bool
    packs: bool = False

    @property
    def plain_s(self) -> float:
        """The seconds of a pass without drafts."""
        return self.costs.of(self.rows, self.rows)

    def trial_s(self, writing: int) -> float:
        """Return the seconds of a trial in which the draft model writes for `writing` rows."""
        own_s = self.costs.of(self.rows, self.rows * (1 + TRIAL_TOKENS)) - self.plain_s
        if not writing or self.model is None:
            return own_s
        return own_s + TRIAL_TOKENS * self.model.model.costs.of(writing, writing)

    def wider_s(self, plan: Plan) -> float:
        """Return how many seconds longer than a plain pass the pass of a plan takes."""
        return self.costs.of(self.rows, self._tokens(plan.depths)) - self.plain_s

    def writing_s(self, plan: Plan) -> float:
        """Return the seconds in which the draft model writes the drafts of a plan."""
        return _total_s(self._writing_s(plan.writing), plan.written_depth)

    def best(self, offers: Mapping[Row, Offer], writing: Sequence[Row] = ()) -> Plan:
        """Return the plan with the most tokens per second; it is empty if no draft helps.

        Args:
            offers: Of the rows that have one.
            writing: The rows whose drafts the draft model has yet to write.
        """
        if self.packs and not writing:
            return self._best_packed(offers)
        token_s = self._writing_s(writing)
        best = Plan({}, self._least_rate)
        longest = max((offer.length for offer in offers.values()), default=0)
        for depth in range(1, longest + 1):
            # A draft model writes for all rows at once; padded rows cost as much as the longest.
            depths = {row: min(offer.length, depth) for row, offer in offers.items()}
            plan = Plan(depths, 0.0, writing)
            if (rate := self._rate(offers, plan, token_s)) > best.rate:
                best = plan._replace(rate=rate)
        return best

    def _best_packed(self, offers: Mapping[Row, Offer]) -> Plan:
        """Return the best plan that can be had by adding the likeliest token that is left."""
        likeliest = _likeliest(offers)[: MAX_PASS_TOKENS - self.rows]
        taken, rate, expected = 0, self._least_rate, 0.0
        for count, (chance, _) in enumerate(likeliest, start=1):
            expected += chance
            found = (self.rows + expected) / self.costs.of(self.rows, self.rows + count)
            if found > rate:
                taken, rate = count, found
        return Plan(Counter(row for _, row in likeliest[:taken]), rate)

    @property
    def _least_rate(self) -> float:
        return _LEAST_GAIN * self.rows / self.plain_s

    def _tokens(self, depths: Mapping[Row, int]) -> int:
        """Return the tokens of a pass with its padding."""
        if self.packs:
            return self.rows + sum(depths.values())
        return self.rows * (1 + max(depths.values(), default=0))

    def _writing_s(self, writing: Sequence[Row]) -> _Seconds:
        """Return the seconds of the draft model's first token for some rows, and of each later."""
        return self.model.writing_s(writing) if writing and self.model else (0.0, 0.0)

    def _rate(self, offers: Mapping[Row, Offer], plan: Plan, token_s: _Seconds) -> float:
        """Return the tokens per second of a plan."""
        trusts = {row: offer.trust for row, offer in offers.items()}
        expected = {row: trusts[row].expected(depth) for row, depth in plan.depths.items()}
        seconds = self.costs.of(self.rows, self._tokens(plan.depths))
        seconds += _total_s(token_s, plan.written_depth)
        if not self.keeps_parts:
            all_right = prod(trusts[row].chance ** depth for row, depth in plan.depths.items())
            seconds += (1.0 - all_right) * self._repeating_s(max(expected.values()))
        return (self.rows + sum(expected.values())) / seconds

    def _repeating_s(self, right: float) -> float:
        """Return the seconds to feed the right tokens of partly wrong drafts again."""
        return self.costs.of(self.rows, self.rows * (2 + ceil(right))) - self.plain_s


def _likeliest(offers: Mapping[Row, Offer]) -> list[tuple[float, Row]]:
    """Return the chances of all tokens worth drafting, and their rows, the likeliest first."""
    chances = [
        (offer.trust.chance**place, row)
        for row, offer in offers.items()
        for place in range(1, offer.length + 1)
    ]
    likely = [each for each in chances if each[0] >= _LEAST_CHANCE]
    return sorted(likely, key=lambda each: each[0], reverse=True)


def _total_s(token_s: _Seconds, count: int) -> float:
    """Return the seconds of `count` tokens, from those of the first and of each later one."""
    first_s, next_s = token_s
    return first_s + (count - 1) * next_s if count else 0.0
