"""Counts of tokens since a session began, and the rate of decoding."""

import time
from dataclasses import dataclass, field
from zlib import crc32

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


@dataclass(slots=True)
class Counters:
    """Counts from the start of the session.

    Attributes:
        prompt_tokens: Prefilled.
        generated_tokens: Drawn and read.
        checksum: Of the drawn tokens, in order.
        drafted_tokens: Drafted for rows that decode.
        accepted_tokens: The accepted ones among them.
        rate: Of generated tokens.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    checksum: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    rate: RateMeter = field(default_factory=RateMeter)

    def count(self, token_id: int) -> None:
        """Count a generated token."""
        self.generated_tokens += 1
        self.checksum = crc32(token_id.to_bytes(4, "big"), self.checksum)

    def count_draft(self, drafted: int, accepted: int) -> None:
        """Count the tokens of a draft, and the accepted ones among them."""
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
