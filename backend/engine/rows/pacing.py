"""Sizes forward passes by time and memory, and counts tokens and their rate."""

import itertools
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Self, TypeVar
from zlib import crc32

import numpy as np
from numpy.typing import ArrayLike, NDArray

from backend.config import (
    AIMED_PASS_SHARE,
    CUT_PER_LOSS,
    PREFILL_ALONE_PAUSES,
    SchedulingOptions,
)
from backend.core.metric_table import Counts

_RATE_WINDOW_S = 0.2


@dataclass(slots=True)
class RateMeter:
    """Turns a growing count into a rate, measured over an interval."""

    _count: int = field(default=0, init=False)
    _at: float = field(default_factory=time.monotonic, init=False)
    _rate: float = field(default=0.0, init=False)

    def of_late(self, count: int) -> float:
        """Return the growth per second between two readings, far enough apart to be meaningful."""
        now = time.monotonic()
        if now - self._at >= _RATE_WINDOW_S:
            self._rate = (count - self._count) / (now - self._at)
            self._count, self._at = count, now
        return self._rate


class Counters(Counts):
    """Counts from the start of the session, and a checksum of the drawn tokens, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.checksum = 0
        self.rate = RateMeter()

    def count(self, token_id: int) -> None:
        """Count a generated token."""
        self.values["generated_tokens"] += 1
        self.checksum = crc32(token_id.to_bytes(4, "big"), self.checksum)


Work = TypeVar("Work", bound=Hashable)


class FairTurns(Generic[Work]):
    """Work that waits, in the order of its arrival; the next is the one that has had the least.

    Short work so waits for no long one. The clock is the number of tokens that each would have had
    by now if all had had the same, and later work starts at it: it puts nothing off for ever.
    """

    def __init__(self) -> None:
        # The tokens of each, and the clock when it came.
        self._spent: dict[Work, float] = {}
        self._clock = 0.0

    def __iter__(self) -> Iterator[Work]:
        return iter(self._spent)

    def add(self, work: Work) -> None:
        """Queue work that has had nothing."""
        self._spent[work] = self._clock

    def remove(self, work: Work) -> None:
        """Forget work; no effect if it does not wait."""
        self._spent.pop(work, None)

    def next(self, tokens: Callable[[Work], int]) -> Work:
        """Return the work that would have had the least after its next turn of so many tokens."""
        return min(self._spent, key=lambda work: self._spent[work] + tokens(work))

    def spend(self, work: Work, tokens: int) -> None:
        """Count tokens that waiting work has had."""
        self._spent[work] += tokens
        self._clock += tokens / len(self._spent)


_GRANULE, _FINE_GRANULE = 16, 4
_FIRST_SIZE = 128
_SMOOTHING = 0.5
_STRETCH = 1.25


@dataclass(slots=True)
class ChunkSizer:
    """Finds by trial the number of tokens of a pass for a target time.

    A pass has fixed costs, so a short one only gives a lower bound of
    the tokens that fit, and the size moves from one full pass to the next until the time fits.

    Attributes:
        first: The tokens of a pass of which nothing is known.
        granule: Passes have a multiple of so many tokens.
    """

    target_s: float
    cap: int
    first: int = _FIRST_SIZE
    granule: int = _GRANULE
    _tokens: float | None = field(default=None, init=False)

    @classmethod
    def limited(cls, target_s: float, cap: int, limit_s: float) -> Self:
        """Return one whose passes stay below a limit in seconds, the first one too."""
        if math.isinf(limit_s):
            return cls(target_s, cap)
        return cls(min(target_s, AIMED_PASS_SHARE * limit_s), cap, _GRANULE, _FINE_GRANULE)

    @property
    def size(self) -> int:
        """Tokens of the next pass."""
        return self.within(self.target_s)

    def within(self, seconds: float) -> int:
        """Return the tokens of a pass of this duration, at least a few."""
        if self._tokens is None:
            return min(self.first, self.cap)
        fitting = int(self._tokens * max(seconds, 0.0) / self.target_s)
        return min(max(fitting // self.granule, 1) * self.granule, self.cap)

    def record(self, tokens: int, seconds: float) -> None:
        """Learn from a pass; a tail too short to be meaningful is ignored."""
        if tokens < self.granule or seconds <= 0.0:
            return
        fitting = tokens * self.target_s / seconds
        known = self._tokens
        if known is None:
            self._tokens = fitting
        elif self._tells_more(tokens, fitting, seconds):
            self._tokens = known + _SMOOTHING * (fitting - known)

    def _tells_more(self, tokens: int, fitting: float, seconds: float) -> bool:
        """Tell whether a pass shows that other numbers fit than is known.

        Those that fit after a short one are at least, and after a long one at most, so many.
        """
        known = self._tokens or 0.0
        if tokens > max(known, self.size) * _STRETCH:
            return fitting < known
        return fitting > known or seconds > self.target_s or tokens >= self.size


@dataclass(frozen=True, slots=True)
class ChunkLimit:
    """The size of a chunk, and of the largest remainder that is still added to it.

    A short remainder is added, because it would cost more alone.
    """

    tokens: int
    rest: int

    def chunk(self, left: int) -> int:
        """Return how many of the `left` tokens of a prompt go into the chunk."""
        return left if left <= self.rest else self.tokens

    def cut(self, losses: int) -> Self:
        """Return the limit of a request over which so many engines were lost."""
        tokens = max(self.tokens // CUT_PER_LOSS**losses, 1)
        return replace(self, tokens=tokens, rest=tokens) if losses else self


@dataclass(frozen=True, slots=True)
class PrefillPace:
    """The prefill that the clock allows in the next turn, as a plain value.

    Attributes:
        shared: The chunk while rows decode.
    """

    has_room: bool
    shared: ChunkLimit
    alone: ChunkLimit

    def limit(self, losses: int, *, is_shared: bool) -> ChunkLimit:
        """Return the limit of a request over which so many engines were lost."""
        return (self.shared if is_shared else self.alone).cut(losses)


class PrefillPacer:
    """Fits prefill into the pauses between decode steps; belongs to the main thread.

    Every pause has room for one chunk, however short it is: a prompt is never starved by the rows
    that decode.
    """

    def __init__(
        self, *, cap: int, cap_alone: int, pause_s: float, limit_s: float = math.inf
    ) -> None:
        """Start without knowledge of the model.

        Args:
            cap: The largest chunk while other requests decode.
            cap_alone: The largest one otherwise.
            pause_s: The maximum wait of decoding rows.
            limit_s: The longest pass.
        """
        self._shared = ChunkSizer.limited(pause_s, cap, limit_s)
        self._alone = ChunkSizer.limited(PREFILL_ALONE_PAUSES * pause_s, cap_alone, limit_s)
        self._pause_s = self._shared.target_s
        self._pause_ends_at = 0.0
        self._is_pause_used = False

    @classmethod
    def of(cls, options: SchedulingOptions, limit_s: float = math.inf) -> Self:
        """Return a pacer with the limits of the options, and of a pass in seconds."""
        return cls(
            cap=options.prefill_chunk,
            cap_alone=options.prefill_chunk_alone,
            pause_s=options.prefill_pause_ms / 1000.0,
            limit_s=limit_s,
        )

    @property
    def size(self) -> int:
        """The tokens of a pass for one request alone."""
        return self._alone.size

    def begin_pause(self, at: float | None = None) -> None:
        """Record that a decode step has ended: just now, or at a monotonic time in seconds."""
        self._pause_ends_at = (time.monotonic() if at is None else at) + self._pause_s
        self._is_pause_used = False

    def pace(self) -> PrefillPace:
        """Return the prefill allowed now."""
        left_s = self._pause_ends_at - time.monotonic()
        return PrefillPace(
            has_room=not self._is_pause_used or left_s > self._pause_s / 2.0,
            shared=_limit(self._shared.within(left_s), self._shared.cap),
            alone=_limit(self._alone.size, self._alone.cap),
        )

    def record(self, tokens: int, seconds: float) -> None:
        """Record a chunk and learn from it.

        Args:
            tokens: Of text; 0 for a medium, which costs more than its tokens suggest.
        """
        self._is_pause_used = True
        for sizer in (self._shared, self._alone):
            sizer.record(tokens, seconds)


# Any of the three terms.
_CHOICES = [chosen for k in (1, 2, 3) for chosen in itertools.combinations(range(3), k)]
# Sums that explain the passes so far, but for a little, are equally likely.
_TOLERANCE = 0.05
# No chunk is made smaller for lack of memory.
LEAST_TOKENS = 16


class PassMemory:
    """Foretells the memory that a pass takes while it runs, by that of earlier ones.

    Few passes leave several explanations: chunks follow the most cautious one.
    """

    def __init__(self) -> None:
        self._passes: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._models: list[NDArray[np.float64]] = []

    def record(self, tokens: int, stop: int, nbytes: int) -> None:
        """Learn from a pass: the latest of its order of magnitude counts.

        Args:
            stop: Its last position plus one.
        """
        if tokens < LEAST_TOKENS or nbytes <= 0:
            return
        self._passes[tokens.bit_length(), stop.bit_length()] = tokens, stop, nbytes
        foretold = self._foretold(tokens, stop)
        if not foretold or any(abs(each / nbytes - 1.0) > _TOLERANCE for each in foretold):
            self._explain()

    def _explain(self) -> None:
        """Find the sums that explain the passes best."""
        taken = np.array(list(self._passes.values()), dtype=float)
        # Relative to their own bytes: small and large passes count the same.
        terms = (_terms(*taken.T[:2]) / taken[:, 2]).T
        found = [fit for chosen in _CHOICES if (fit := _fit(terms, chosen)) is not None]
        least = min((error for error, _ in found), default=0.0)
        self._models = [model for error, model in found if error <= least + _TOLERANCE]

    def least(self, stop: int) -> int:
        """Return the bytes that even the smallest pass takes up to a position; 0 if unknown.

        No less than one that was as small and ended earlier, if other passes confirm it.
        """
        seen = [
            nbytes * LEAST_TOKENS / tokens
            for tokens, end, nbytes in self._passes.values()
            if tokens < 2 * LEAST_TOKENS and end <= stop
        ]
        return int(min([max(seen), *self._foretold(LEAST_TOKENS, stop)])) if seen else 0

    def most(self, tokens: int, stop: int) -> int:
        """Return the bytes that a pass may take; 0 if none was recorded."""
        return int(max(self._foretold(tokens, stop), default=0))

    def fitting(self, start: int, tokens: int, nbytes: float) -> int:
        """Return how many of so many tokens from a position on may take these bytes.

        Returns:
            At least a few.
        """
        if self.most(tokens, start + tokens) <= nbytes:
            return tokens
        sizes = range(LEAST_TOKENS, tokens)
        fitting = bisect_right(sizes, nbytes, key=lambda n: self.most(n, start + n))
        return sizes[fitting - 1] if fitting else min(LEAST_TOKENS, tokens)

    def _foretold(self, tokens: int, stop: int) -> list[float]:
        terms = _terms(tokens, stop)
        return [float(model @ terms) for model in self._models]


def _terms(tokens: ArrayLike, stop: ArrayLike) -> NDArray[np.float64]:
    """Return the terms of the memory of passes: activations, copies of a layer's KV, scores."""
    count, length = np.asarray(tokens, float), np.asarray(stop, float)
    return np.stack([count, length, count * length])


def _fit(
    terms: NDArray[np.float64], chosen: Sequence[int]
) -> tuple[float, NDArray[np.float64]] | None:
    """Return the error of a sum of chosen terms, and its factors; `None` if one is below 0."""
    factors, _, rank, _ = np.linalg.lstsq(terms[:, chosen], np.ones(len(terms)), rcond=None)
    if rank < len(chosen) or (factors < 0).any():
        return None
    model = np.zeros(terms.shape[1])
    model[list(chosen)] = factors
    return float(np.sqrt(np.mean((terms @ model - 1.0) ** 2))), model


def _limit(tokens: int, cap: int) -> ChunkLimit:
    fitting = min(tokens, cap)
    return ChunkLimit(fitting, min(int(fitting * _STRETCH), cap))
