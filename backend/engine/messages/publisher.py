"""Events from the engine to the event loop, many with one wake-up."""

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from backend.core.step import EngineEvent
from backend.engine.messages.failure import Failure
from backend.engine.messages.stream import Publication
from backend.errors import BackendError

HandOver: TypeAlias = Callable[[Sequence[Publication]], None]


class Publisher:
    """Collects the events of all requests; on one thread.

    A reply on the wire costs about as much as a token of a very small model. So the replies of
    all streams together are limited, and faster tokens share one; urgent events (a first token,
    an end, an error) go out at once.

    Attributes:
        is_urgent: Whether one of the events is: `flush` should follow soon.
    """

    def __init__(self, hand_over: HandOver, max_replies_per_s: int) -> None:
        """Start empty.

        Args:
            hand_over: Receives events, in order; must not block.
            max_replies_per_s: The limit; 0 is none.
        """
        self._hand_over = hand_over
        self._reply_interval_s = 1.0 / max_replies_per_s if max_replies_per_s else 0.0
        self._kept: list[Publication] = []
        self.is_urgent = False
        self._handed_over_at = 0.0

    def put(
        self, request_id: str, event: EngineEvent | BackendError, *, is_urgent: bool = False
    ) -> None:
        """Add an event."""
        told = Failure.of(event) if isinstance(event, BackendError) else event
        self._kept.append(Publication(request_id, told))
        self.is_urgent = self.is_urgent or is_urgent

    def settle(self, streams: int) -> None:
        """Hand everything over if so many streams may be replied to again."""
        if time.monotonic() >= self._handed_over_at + streams * self._reply_interval_s:
            self.flush()

    def flush(self) -> None:
        """Hand over everything."""
        kept, self._kept = self._kept, []
        self.is_urgent = False
        if kept:
            self._handed_over_at = time.monotonic()
            self._hand_over(kept)
