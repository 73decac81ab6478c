"""The costs and gains of drafts: their sources, the trust in these, and the time of passes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from math import ceil
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from backend.engine.rows.row import Row

if TYPE_CHECKING:
    import mlx.core as mx

    from backend.engine.kv.batch_caches import BatchCaches


class Source(Enum):
    """The origin of a draft.

    Attributes:
        FORCED: The grammar of the reply allows only one text.
        MATCH: The latest few tokens occurred earlier in the row's text.
        LONG_MATCH: Many of the latest tokens did.
        MODEL: A draft model or a head wrote it.
    """

    FORCED = "forced"
    MATCH = "match"
    LONG_MATCH = "long match"
    MODEL = "model"


SOURCES: Mapping[str, Sequence[Source]] = {
    "auto": tuple(Source),
    "lookup": (Source.MATCH, Source.LONG_MATCH),
    "draft": (Source.MODEL,),
    "mtp": (Source.MODEL,),
    "off": (),
}
"""The sources that draft, by the option `speculation`."""

FIRST_CHANCES = {Source.FORCED: 0.9, Source.MATCH: 0.5, Source.LONG_MATCH: 0.8, Source.MODEL: 0.7}
"""The assumed chance that a drafted token is right, until the source has been measured."""


class Leave(NamedTuple):
    """The sources that may spend time in a step.

    Attributes:
        drafts: Those that may draft where it is likely to pay.
        trials: Those that may also draft to measure whether it pays.
    """

    drafts: Collection[Source]
    trials: Collection[Source]


# The weight of the latest token in the average of a trust.
_LATEST_SHARE = 0.1
_REST_TOKENS = 32


@dataclass(slots=True)
class Trust:
    """The trust in one source of drafts for one row.

    Attributes:
        chance: The chance that a drafted token is right, given that all before it are.
        pays: Whether its latest draft was expected to save time.
    """

    chance: float
    pays: bool = True
    _tries_at: int = 0

    def learn(self, offered: int, accepted: int, position: int) -> None:
        """Learn from a draft at a position: the tokens that the row has drawn so far."""
        for n in range(min(accepted + 1, offered)):
            self.chance += _LATEST_SHARE * ((n < accepted) - self.chance)
        self._tries_at = position + _REST_TOKENS

    def rest(self, position: int) -> None:
        """Take no drafts until the row has drawn some tokens beyond `position`."""
        self.pays = False
        self._tries_at = position + _REST_TOKENS

    def wants_trial(self, position: int) -> bool:
        """Tell whether it is time to retry a source that did not pay."""
        return not self.pays and position >= self._tries_at


# The median of so many passes counts: some are delayed by something else.
_LATEST_PASSES = 5
# After this many passes with drafts, one without measures the saving.
_PLAIN_INTERVAL = 64


class PassCosts:
    """The cost of a pass by its rows and its tokens per row."""

    def __init__(self, seconds: Mapping[int, float], limit_s: float = math.inf) -> None:
        """Start with a measured curve.

        Args:
            seconds: The seconds of a pass over one row, by its number of tokens.
            limit_s: Drafts never make a pass longer.
        """
        self.limit_s = limit_s
        self._curve = _rising(seconds)
        self._at: dict[int, float] = {}
        # Times relative to the curve, for a number of rows and about as many tokens.
        self._ratios: dict[tuple[int, int], deque[float]] = {}
        self._drafted = Counter[int]()
        # Asked for many times between two passes.
        self._known: dict[tuple[int, int], float] = {}

    def of(self, rows: int, tokens: int) -> float:
        """Return the seconds of a pass over `tokens` tokens of `rows` rows together."""
        key = rows, tokens
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self._ratio(rows, tokens) * self._on_curve(tokens)
        return known

    def of_each(self, rows: int, counts: Iterable[int]) -> list[float]:
        """Return the seconds of passes over some numbers of tokens of `rows` rows together."""
        ratio, about, seconds = 1.0, -1, []
        for tokens in counts:
            if (order := (-(-tokens // rows) - 1).bit_length()) != about:
                ratio, about = self._ratio(rows, tokens), order
            seconds.append(ratio * (self._at.get(tokens) or self._on_curve(tokens)))
        return seconds

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        """Learn from a pass."""
        self._drafted[rows] = self._drafted[rows] + 1 if tokens > rows else 0
        guess = deque([self._ratio(rows, tokens)], maxlen=_LATEST_PASSES)
        latest = self._ratios.setdefault((rows, _about(rows, tokens)), guess)
        latest.append(seconds / self._on_curve(tokens))
        self._known.clear()

    def wants_plain(self, rows: int) -> bool:
        """Tell whether the cost of a pass without drafts is a guess or out of date."""
        return (rows, 0) not in self._ratios or self._drafted[rows] >= _PLAIN_INTERVAL

    def _ratio(self, rows: int, tokens: int) -> float:
        """Return the relative time of such passes; an unseen width uses a smaller one."""
        for about in range(_about(rows, tokens), -1, -1):
            if latest := self._ratios.get((rows, about)):
                return median_low(latest)
        return 1.0

    def _on_curve(self, tokens: int) -> float:
        """Return the seconds of `tokens` tokens of one row, interpolated or extrapolated."""
        if (known := self._at.get(tokens)) is not None:
            return known
        points = self._curve
        if len(points) == 1:
            return points[0][1]
        right = min(max(bisect_left(points, (tokens, 0.0)), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        found = self._at[tokens] = y0 + (y1 - y0) / (x1 - x0) * (tokens - x0)
        return found


def _rising(seconds: Mapping[int, float]) -> list[tuple[int, float]]:
    """Return a curve in order, without delays: fewer tokens never take longer than more."""
    widths = sorted(seconds, reverse=True)
    return list(zip(widths, accumulate(map(seconds.__getitem__, widths), min), strict=True))[::-1]


def _about(rows: int, tokens: int) -> int:
    """Return the order of magnitude of tokens per row.

    0 is a plain pass, then at most 2, 3 to 4, 5 to 8, and so on.
    """
    return (ceil(tokens / rows) - 1).bit_length()


ByRow: TypeAlias = "Callable[[mx.array], mx.array]"

# A row with at most this many unread tokens is read in the pass that drafts for it.
_READ_ALONG_TOKENS = 16
_LEAST_CHUNK_TOKENS, _CHUNK_TOKENS = 32, 512


class Company(Protocol):
    """A batch of the model; its rows are in the order of the caches."""

    caches: BatchCaches
    rows: list[Row]


class DraftModel(Protocol):
    """A smaller model that reads rows of a batch and writes their drafts.

    It may forget a row at any time, which costs only time.

    Attributes:
        most_tokens: Of a draft.
        is_at_once: Whether one pass writes all tokens of a draft.
    """

    costs: PassCosts
    most_tokens: int
    is_at_once: bool

    @property
    def nbytes(self) -> int:
        """Size of its caches."""

    def join(self, company: Company) -> None:
        """Draft for the rows of a batch."""

    def follow(self, rows: Sequence[Row]) -> None:
        """Forget all other rows."""

    def see(self, rows: Sequence[Row], counts: Sequence[int], by_row: ByRow) -> None:
        """Handle a pass of the model.

        Args:
            by_row: Returns an output of a module in the pass as [B, T, n].
        """

    def unread(self, row: Row) -> int:
        """Return the number of unread tokens of a row, not counting the latest."""

    def read(self, row: Row, count: int) -> float:
        """Read the next `count` tokens of a row, at most the unread ones; return the seconds."""

    def write(self, rows: Sequence[Row], depth: int) -> Sequence[Sequence[int]]:
        """Return `depth` tokens of its own vocabulary that may follow each row."""


class ModelSource:
    """The drafts of a draft model, with their price in seconds."""

    def __init__(self, model: DraftModel) -> None:
        self.model = model

    def is_ready(self, row: Row) -> bool:
        """Tell whether a row has been read almost to its end."""
        return self.model.unread(row) <= _READ_ALONG_TOKENS

    def writing_s(self, rows: Sequence[Row]) -> tuple[float, float]:
        """Return the seconds of the first drafted token of each row, and of each later one."""
        costs, unread = self.model.costs, max(map(self.model.unread, rows))
        width = 1 + min(unread, _READ_ALONG_TOKENS)
        later_s = 0.0 if self.model.is_at_once else costs.of(len(rows), len(rows))
        return costs.of(len(rows), len(rows) * width), later_s

    def trial_s(self, rows: int) -> float:
        """Return the seconds of the drafts of a trial."""
        passes = 1 if self.model.is_at_once else TRIAL_TOKENS
        return passes * self.model.costs.of(rows, rows)

    def reading_s(self, row: Row) -> float:
        """Return the seconds to read a row up to its end."""
        chunks, rest = divmod(self.model.unread(row), _CHUNK_TOKENS)
        costs = self.model.costs
        return chunks * costs.of(1, _CHUNK_TOKENS) + (costs.of(1, rest) if rest else 0.0)

    def read_on(self, row: Row, limit_s: float) -> float:
        """Read a part of a row in about `limit_s` seconds; return the real seconds."""
        costs, unread = self.model.costs, self.model.unread(row)
        count = _LEAST_CHUNK_TOKENS
        while count < _CHUNK_TOKENS and costs.of(1, 2 * count) <= limit_s:
            count *= 2
        return self.model.read(row, min(count, unread))

    def write(self, rows: Sequence[Row], depth: int) -> Mapping[Row, Sequence[int]]:
        """Return `depth` tokens that may follow each row."""
        return dict(zip(rows, self.model.write(rows, depth), strict=True))


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


@dataclass(slots=True)
class Prices:
    """The prices of the next pass.

    Attributes:
        rows: The rows of the pass, at least one.
        keeps_parts: Whether a row may keep only some of the tokens that it feeds.
        packs: Whether rows are not padded to the longest draft.
        plain_s: The seconds of a pass without drafts.
    """

    costs: PassCosts
    model: ModelSource | None
    rows: int
    keeps_parts: bool
    packs: bool = False
    plain_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.plain_s = self.costs.of(self.rows, self.rows)

    def trial_s(self, writing: int) -> float:
        """Return the seconds of a trial in which the draft model writes for `writing` rows."""
        own_s = self.costs.of(self.rows, self.rows * (1 + TRIAL_TOKENS)) - self.plain_s
        if not writing or self.model is None:
            return own_s
        return own_s + self.model.trial_s(writing)

    def wider_s(self, plan: Plan) -> float:
        """Return how many seconds longer than a plain pass the pass of a plan takes."""
        return self.costs.of(self.rows, self._tokens(plan.depths.values())) - self.plain_s

    def writing_s(self, plan: Plan) -> float:
        """Return the seconds in which the draft model writes the drafts of a plan."""
        return _total_s(self._writing_s(plan.writing), plan.written_depth)

    def best(self, offers: Mapping[Row, Offer], writing: Sequence[Row] = ()) -> Plan:
        """Return the plan with the most tokens per second; it is empty if no draft helps.

        Args:
            writing: The rows whose drafts the draft model has yet to write.
        """
        if self.packs and not writing:
            return self._best_packed(offers)
        rates = self._rates(offers, writing)
        least = _LEAST_GAIN * self.rows / self.plain_s
        if max(rates, default=0.0) <= least:
            return Plan({}, least)
        depth = rates.index(max(rates)) + 1
        depths = {row: min(offer.length, depth) for row, offer in offers.items()}
        return Plan(depths, rates[depth - 1], writing)

    def _rates(self, offers: Mapping[Row, Offer], writing: Sequence[Row]) -> list[float]:
        """Return the tokens per second if drafts are cut after one token, two, and so on.

        A draft model writes for all rows at once; padded rows cost as much as the longest.
        """
        depths = range(1, 1 + max((offer.length for offer in offers.values()), default=0))
        lengths = [offer.length for offer in offers.values()]
        chances = [offer.trust.chance for offer in offers.values()]
        counts = [self._tokens(min(length, depth) for length in lengths) for depth in depths]
        written = max((offers[row].length for row in writing if row in offers), default=0)
        token_s = self._writing_s(writing)
        expected, all_right, rates = [0.0] * len(lengths), 1.0, []
        for depth, seconds in zip(depths, self.costs.of_each(self.rows, counts), strict=True):
            is_short = seconds <= self.costs.limit_s
            for i, length in enumerate(lengths):
                if depth <= length:
                    expected[i] += chances[i] ** depth
                    all_right *= chances[i]
            if writing:
                seconds += _total_s(token_s, min(depth, written))
            if not self.keeps_parts:
                # The right tokens of partly wrong drafts are fed again.
                width = 2 + ceil(max(expected))
                repeating_s = self.costs.of(self.rows, self.rows * width) - self.plain_s
                seconds += (1.0 - all_right) * repeating_s
            rates.append((self.rows + sum(expected)) / seconds if is_short else 0.0)
        return rates

    def _best_packed(self, offers: Mapping[Row, Offer]) -> Plan:
        """Return the best plan that can be had by adding the likeliest token that is left."""
        likeliest = _likeliest(offers)[: MAX_PASS_TOKENS - self.rows]
        taken, rate, expected = 0, _LEAST_GAIN * self.rows / self.plain_s, 0.0
        counts = range(self.rows + 1, self.rows + len(likeliest) + 1)
        seconds = self.costs.of_each(self.rows, counts)
        for count, (chance, _) in enumerate(likeliest, start=1):
            expected += chance
            found = (self.rows + expected) / seconds[count - 1]
            if found > rate and seconds[count - 1] <= self.costs.limit_s:
                taken, rate = count, found
        return Plan(Counter(row for _, row in likeliest[:taken]), rate)

    def _tokens(self, depths: Iterable[int]) -> int:
        """Return the tokens of a pass with its padding, by the drafted tokens of each row."""
        if self.packs:
            return self.rows + sum(depths)
        return self.rows * (1 + max(depths, default=0))

    def _writing_s(self, writing: Sequence[Row]) -> _Seconds:
        """Return the seconds of the draft model's first token for some rows, and of each later."""
        return self.model.writing_s(writing) if writing and self.model else (0.0, 0.0)


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


# A source may lose so many passes before it has saved any.
_GRANT = 8.0
# Savings beyond this are not kept for worse times, and losses beyond it are forgotten.
_MOST = 64.0
# Afterwards all sources together may lose this share of the time.
_LOST_SHARE = 0.015
# A step that is slower than expected by this factor was delayed by something else. If it was not,
# the costs of passes soon follow.
_OUTLIER = 2.0


class Budget:
    """The passes that each source may still lose; a source with none left does not draft.

    It counts the real times of steps, not the expected ones. So the loss is bounded even where
    the measured costs of passes are wrong.
    """

    def __init__(self, sources: Iterable[Source]) -> None:
        self._left = dict.fromkeys(sources, _GRANT)
        self._debts: dict[Row, float] = {}
        self._begin_step()

    def _begin_step(self) -> None:
        self._drafted, self._accepted = Counter[Source](), Counter[Source]()
        self._extra_s = self._writing_s = self._lent_s = 0.0

    def left(self, source: Source) -> float:
        """Return how many passes a source may still lose."""
        return self._left.get(source, 0.0)

    def leave(self, own: float, writing: float) -> Leave:
        """Return the sources that may draft now.

        Args:
            writing: The same for a source whose drafts a model writes.
        """
        drafts, trials = [], []
        for source, left in self._left.items():
            price = writing if source is Source.MODEL else own
            if left > 0.0:
                drafts.append(source)
                if price <= _MOST and left >= min(price, _GRANT):
                    trials.append(source)
        return Leave(drafts, trials)

    def affords(self, source: Source, passes: float) -> bool:
        """Tell whether a source may lose some passes in a trial.

        One that has its whole grant left may lose more, as the price may be wrong.
        """
        return passes <= _MOST and self.left(source) >= min(passes, _GRANT)

    def earn(self, passes: float) -> bool:
        """Let the sources lose a share of some time; false if each may lose its whole grant."""
        has_earned = False
        for source, left in self._left.items():
            if left < _GRANT:
                share = _LOST_SHARE * passes / len(self._left)
                self._left[source] = min(left + share, _GRANT)
                has_earned = True
        return has_earned

    def expect(self, extra_s: float, writing_s: float) -> None:
        """Note how much longer the step is likely to take for its drafts.

        Args:
            extra_s: The seconds, including those of the draft model.
            writing_s: The seconds of the draft model.
        """
        self._extra_s += extra_s
        self._writing_s += writing_s

    def count(self, source: Source, drafted: int, accepted: int) -> None:
        """Count the drafted and accepted tokens of a row in the step."""
        self._drafted[source] += drafted
        self._accepted[source] += accepted

    def lend(self, row: Row, seconds: float, plain_s: float) -> None:
        """Let the draft model read a row in the step; it owes the seconds until the row leaves."""
        self._lent_s += seconds
        self._debts[row] = self._debts.get(row, 0.0) + seconds / plain_s

    def follow(self, rows: Collection[Row]) -> None:
        """Collect the debts of rows that have left."""
        for row in self._debts.keys() - rows:
            self._charge(Source.MODEL, self._debts.pop(row))

    def settle(
        self, seconds: float, passes: int, plain_s: float, rows: int, asked: Source | None
    ) -> None:
        """Charge the sources of a step with its loss, or credit its saving.

        Args:
            passes: Its rows got the tokens of so many passes without drafts, and accepted ones.
            plain_s: The seconds of a pass without drafts.
            asked: The latest source that a step waited for; it pays for a step without drafts.
        """
        expected_s = max(passes, 1) * plain_s + self._extra_s + self._lent_s
        lost_s = min(seconds, _OUTLIER * expected_s) - passes * plain_s - self._lent_s
        self._charge(Source.MODEL, self._writing_s / plain_s)
        lost = (lost_s - self._writing_s) / plain_s
        shares = self._drafted or Counter(filter(None, (asked,)))
        for source, count in shares.items():
            saved = self._accepted[source] / rows
            self._charge(source, lost * count / shares.total() - saved)
        self._begin_step()

    def _charge(self, source: Source, passes: float) -> None:
        if source in self._left:
            self._left[source] = min(max(self._left[source] - passes, -_MOST), _MOST)
