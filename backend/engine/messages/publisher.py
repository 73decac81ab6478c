"""Events from the engine to the event loop, many with one wake-up."""

import time
from collections.abc import Callable
from typing import TypeAlias

from backend.core.step import EngineEvent, Steps, TokenStep
from backend.engine.messages.failure import Failure
from backend.engine.messages.protocol import Told
from backend.errors import BackendError

HandOver: TypeAlias = Callable[[Told], None]


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
            hand_over: Receives all events since the last time; must not block.
            max_replies_per_s: The limit; 0 is none.
        """
        self._hand_over = hand_over
        self._reply_interval_s = 1.0 / max_replies_per_s if max_replies_per_s else 0.0
        self._steps: dict[str, Steps] = {}
        self._failures: dict[str, Failure] = {}
        self.is_urgent = False
        self._handed_over_at = 0.0

    def put(
        self, request_id: str, event: EngineEvent | BackendError, *, is_urgent: bool = False
    ) -> None:
        """Add an event."""
        if isinstance(event, BackendError):
            self._failures[request_id] = Failure.of(event)
        else:
            if (steps := self._steps.get(request_id)) is None:
                steps = self._steps[request_id] = Steps()
            has_more = isinstance(event, TokenStep) and event.finish_reason is None
            if isinstance(event, TokenStep) and has_more and event.logprobs is None:
                # As `add` does, for nearly every token.
                steps.token_ids.append(event.token_id)
            else:
                steps.add(event)
        self.is_urgent = self.is_urgent or is_urgent

    def settle(self, streams: int) -> None:
        """Hand everything over if so many streams may be replied to again."""
        if time.monotonic() >= self._handed_over_at + streams * self._reply_interval_s:
            self.flush()

    def flush(self) -> None:
        """Hand over everything."""
        self.is_urgent = False
        if not self._steps and not self._failures:
            return
        told = Told(self._steps, self._failures)
        self._steps, self._failures = {}, {}
        self._handed_over_at = time.monotonic()
        self._hand_over(told)
