"""What things cost: chunk sizes that let nobody wait long, and the rate of decoding."""

import time
from dataclasses import dataclass, field

_GRANULE = 16
_FIRST_CHUNK = 128
_SMOOTHING = 0.5
_STRETCH = 1.25
_RATE_WINDOW_S = 0.2


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

    @property
    def has_room(self) -> bool:
        """Whether so much of the pause is left that another chunk is worth its while."""
        return self._pause_left_s() > self.pause_s / 2.0

    def chunk(self, left: int, *, is_alone: bool) -> int:
        """Return how many of the `left` tokens of a prompt go into the next chunk.

        A short rest is taken along, for it would cost more by itself.
        """
        cap = self.cap_alone if is_alone else self.cap
        fitting = min(self._fitting(is_alone=is_alone), cap)
        return left if left <= min(fitting * _STRETCH, cap) else fitting

    def _fitting(self, *, is_alone: bool) -> int:
        if self._tokens_per_s is None:
            return _FIRST_CHUNK
        seconds = self.pause_s if is_alone else self._pause_left_s()
        return max(int(self._tokens_per_s * seconds) // _GRANULE, 1) * _GRANULE

    def record(self, tokens: int, seconds: float) -> None:
        """Learn from a chunk; tails too short to tell anything are ignored."""
        if tokens < _GRANULE or seconds <= 0.0:
            return
        rate = tokens / seconds
        known = self._tokens_per_s
        self._tokens_per_s = rate if known is None else known + _SMOOTHING * (rate - known)

    def _pause_left_s(self) -> float:
        return self._pause_ends_at - time.monotonic()


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
