"""What things cost: chunk sizes that let nobody wait long, and the rate of decoding."""

import time
from dataclasses import dataclass, field

_GRANULE = 16
_FIRST_CHUNK = 128
_SMOOTHING = 0.5
_STRETCH = 1.25
_RATE_WINDOW_S = 0.2


@dataclass(frozen=True, slots=True)
class ChunkLimit:
    """How many tokens fit into a chunk, and how many a prompt may have left to fit into it whole.

    A short rest is taken along, for it would cost more by itself.
    """

    tokens: int
    rest: int

    def chunk(self, left: int) -> int:
        """Return how many of the `left` tokens of a prompt go into the chunk."""
        return left if left <= self.rest else self.tokens


@dataclass(frozen=True, slots=True)
class PrefillPace:
    """What the clock allows the next turn, as a plain value.

    Attributes:
        has_room: Whether so much of the pause is left that another chunk is worth its while.
        beside: The chunk beside decoding rows.
        alone: The chunk where there are none.
    """

    has_room: bool
    beside: ChunkLimit
    alone: ChunkLimit


@dataclass(slots=True)
class ChunkPacer:
    """Learns what a prefill token costs, and fits prefill into the pauses between decode steps.

    Attributes:
        cap: Largest chunk while other requests decode.
        cap_alone: Largest chunk while none does.
        pause_s: How long decoding rows should wait at most.
    """

    cap: int
    cap_alone: int
    pause_s: float
    _tokens_per_s: float | None = field(default=None, init=False)
    _pause_ends_at: float = field(default=0.0, init=False)

    def begin_pause(self) -> None:
        """Note that a decode step has just been taken."""
        self._pause_ends_at = time.monotonic() + self.pause_s

    def pace(self) -> PrefillPace:
        """Return what may be prefilled now."""
        pause_left_s = self._pause_ends_at - time.monotonic()
        return PrefillPace(
            has_room=pause_left_s > self.pause_s / 2.0,
            beside=self._limit(pause_left_s, self.cap),
            alone=self._limit(self.pause_s, self.cap_alone),
        )

    def _limit(self, seconds: float, cap: int) -> ChunkLimit:
        fitting = min(self._fitting(seconds), cap)
        return ChunkLimit(fitting, min(int(fitting * _STRETCH), cap))

    def _fitting(self, seconds: float) -> int:
        if self._tokens_per_s is None:
            return _FIRST_CHUNK
        return max(int(self._tokens_per_s * seconds) // _GRANULE, 1) * _GRANULE

    def record(self, tokens: int, seconds: float) -> None:
        """Learn from a chunk; tails too short to tell anything are ignored."""
        if tokens < _GRANULE or seconds <= 0.0:
            return
        rate = tokens / seconds
        known = self._tokens_per_s
        self._tokens_per_s = rate if known is None else known + _SMOOTHING * (rate - known)


@dataclass(slots=True)
class RateMeter:
    """Turns a growing count into a rate, measured over a while."""

    _count: int = field(default=0, init=False)
    _at: float = field(default_factory=time.monotonic, init=False)
    _rate: float = field(default=0.0, init=False)

    def of_late(self, count: int) -> float:
        """Return the growth per second between two looks, as far apart as it takes to tell."""
        now = time.monotonic()
        if now - self._at >= _RATE_WINDOW_S:
            self._rate = (count - self._count) / (now - self._at)
            self._count, self._at = count, now
        return self._rate
