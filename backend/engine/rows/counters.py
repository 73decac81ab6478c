"""Counts of tokens since a session began, and the rate of decoding."""

import time
from dataclasses import dataclass, field
from zlib import crc32

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
        rate: Of generated tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.checksum = 0
        self.rate = RateMeter()

    def count(self, token_id: int) -> None:
        """Count a generated token."""
        self.values["generated_tokens"] += 1
        self.checksum = crc32(token_id.to_bytes(4, "big"), self.checksum)
