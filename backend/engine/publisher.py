"""From the engine thread to the event loop, many events with one wake-up."""

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from backend.core.step import EngineEvent
from backend.engine.stream import Publication
from backend.errors import BackendError

HandOver: TypeAlias = Callable[[Sequence[Publication]], None]


class Publisher:
    """Gathers the events of all requests; belongs to the engine thread.

    A wake-up of the loop and a reply on the wire cost about as much as a token of a very small
    model. So tokens that come faster than anybody reads are handed over together; what somebody
    waits for, a first token, an end, an error, goes at once.
    """

    def __init__(self, hand_over: HandOver, interval_s: float) -> None:
        """Start empty.

        Args:
            hand_over: Takes events, in order; must not block.
            interval_s: How long events may be kept that nobody waits for.
        """
        self._hand_over = hand_over
        self._interval_s = interval_s
        self._kept: list[Publication] = []
        self._is_urgent = False
        self._due_at = 0.0

    def put(
        self, request_id: str, event: EngineEvent | BackendError, *, is_urgent: bool = False
    ) -> None:
        """Take an event."""
        self._kept.append(Publication(request_id, event))
        self._is_urgent = self._is_urgent or is_urgent

    def settle(self) -> None:
        """Hand everything over if it has been kept for long enough."""
        if time.monotonic() >= self._due_at:
            self.flush()

    def hurry(self) -> None:
        """Hand everything over if something of it is urgent."""
        if self._is_urgent:
            self.flush()

    def flush(self) -> None:
        """Hand over everything."""
        kept, self._kept = self._kept, []
        self._is_urgent = False
        if kept:
            self._due_at = time.monotonic() + self._interval_s
            self._hand_over(kept)
