"""One request's events on their way from the engine to its consumer on the event loop."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from copy import copy

from msgspec import Struct

from backend.core.step import EngineEvent, PrefillDone, TokenStep
from backend.engine.messages.failure import Failure
from backend.errors import BackendError


class Publication(Struct, frozen=True, array_like=True):
    """An event of one request, or the failure that ends it."""

    request_id: str
    event: PrefillDone | TokenStep | Failure

    @property
    def is_last(self) -> bool:
        """Whether it ends its request."""
        return isinstance(self.event, Failure) or _finishes(self.event)


class TokenStream(AsyncIterator[Sequence[EngineEvent]]):
    """Yields all events published since the last read, together.

    Lives on the event loop. Ends after the step that carries a finish reason; a failure is
    raised after the events before it.

    Attributes:
        has_ended: Whether the engine is done with this request.
    """

    def __init__(self) -> None:
        self._events: list[EngineEvent] = []
        self._failure: BackendError | None = None
        self.has_ended = False
        self._arrival = asyncio.Event()

    def deliver(self, event: EngineEvent | BackendError) -> None:
        """Take over one event."""
        if isinstance(event, BackendError):
            self._failure, self.has_ended = event, True
        else:
            self._events.append(event)
            self.has_ended = _finishes(event)
        self._arrival.set()

    async def __anext__(self) -> Sequence[EngineEvent]:
        while not self._events and not self.has_ended:
            self._arrival.clear()
            await self._arrival.wait()
        if self._events:
            events, self._events = self._events, []
            return events
        if self._failure is not None:
            raise copy(self._failure)
        raise StopAsyncIteration


def _finishes(event: EngineEvent) -> bool:
    return isinstance(event, TokenStep) and event.finish_reason is not None
