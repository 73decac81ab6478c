"""Sizes forward passes so that no request waits long, and counts tokens and their rate."""

import math
import time
from dataclasses import dataclass, field, replace
from typing import Self
from zlib import crc32

from backend.config import AIMED_PASS_SHARE, CUT_PER_LOSS, SchedulingOptions
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
    """Counts from the start of the session.

    Attributes:
        checksum: Of the drawn tokens, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.checksum = 0
        self.rate = RateMeter()

    def count(self, token_id: int) -> None:
        """Count a generated token."""
        self.values["generated_tokens"] += 1
        self.checksum = crc32(token_id.to_bytes(4, "big"), self.checksum)


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
        cap: The maximum tokens of a pass.
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
        elif fitting > known or seconds > self.target_s or tokens >= self.size:
            self._tokens = known + _SMOOTHING * (fitting - known)


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
            pause_s: The maximum wait of decoding rows.
            limit_s: The longest pass.
        """
        self._cap = cap
        self._sizer = ChunkSizer.limited(pause_s, cap_alone, limit_s)
        self._pause_s = self._sizer.target_s
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
        return self._sizer.size

    def begin_pause(self, at: float | None = None) -> None:
        """Record that a decode step has ended: just now, or at a monotonic time in seconds."""
        self._pause_ends_at = (time.monotonic() if at is None else at) + self._pause_s
        self._is_pause_used = False

    def pace(self) -> PrefillPace:
        """Return the prefill allowed now."""
        left_s = self._pause_ends_at - time.monotonic()
        return PrefillPace(
            has_room=not self._is_pause_used or left_s > self._pause_s / 2.0,
            shared=_limit(self._sizer.within(left_s), self._cap),
            alone=_limit(self._sizer.size, self._sizer.cap),
        )

    def record(self, tokens: int, seconds: float) -> None:
        """Record a chunk and learn from it.

        Args:
            tokens: Of text; 0 for a medium, which costs more than its tokens suggest.
        """
        self._is_pause_used = True
        self._sizer.record(tokens, seconds)


def _limit(tokens: int, cap: int) -> ChunkLimit:
    fitting = min(tokens, cap)
    return ChunkLimit(fitting, min(int(fitting * _STRETCH), cap))
