"""One request's events on their way from the engine thread to its consumer on the event loop."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from copy import copy
from dataclasses import dataclass

from backend.core.step import EngineEvent, TokenStep
from backend.errors import BackendError


@dataclass(frozen=True, slots=True)
class Publication:
    """An event of one request, or the failure that ends it."""

    request_id: str
    event: EngineEvent | BackendError


def is_last(event: EngineEvent | BackendError) -> bool:
    """Tell whether an event ends its request."""
    return isinstance(event, BackendError) or (
        isinstance(event, TokenStep) and event.finish_reason is not None
    )


class TokenStream(AsyncIterator[Sequence[EngineEvent]]):
    """Yields what was published since the last look, all of it together.

    Lives on the event loop. Ends after the step that carries a finish reason; a failure is
    raised after the events before it were taken.

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
            self._failure = event
        else:
            self._events.append(event)
        self.has_ended = is_last(event)
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
