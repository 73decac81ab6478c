"""How much of the prompts came from the prompt cache, over the last hours."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from backend.core.prompt_cache import ReuseSpan

SPAN_S = 300.0
MAX_SPANS = 60


@dataclass(slots=True)
class _Span:
    number: int
    requests: int = 0
    looked_up_tokens: int = 0
    hit_tokens: int = 0


class ReuseHistory:
    """Counts lookups by spans of five minutes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start empty.

        Args:
            clock: In seconds.
        """
        self._clock = clock
        self._spans: deque[_Span] = deque(maxlen=MAX_SPANS)

    def record(self, tokens: int, hit_tokens: int) -> None:
        """Count a prompt and what of it was restored."""
        number = int(self._clock() // SPAN_S)
        if not self._spans or self._spans[-1].number != number:
            self._spans.append(_Span(number))
        span = self._spans[-1]
        span.requests += 1
        span.looked_up_tokens += tokens
        span.hit_tokens += hit_tokens

    def spans(self) -> tuple[ReuseSpan, ...]:
        """Return those of the last five hours, the oldest first."""
        now = self._clock()
        oldest = now // SPAN_S - MAX_SPANS
        return tuple(
            ReuseSpan(
                age_s=now - span.number * SPAN_S,
                requests=span.requests,
                looked_up_tokens=span.looked_up_tokens,
                hit_tokens=span.hit_tokens,
            )
            for span in self._spans
            if span.number > oldest
        )
