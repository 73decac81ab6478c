"""Who waits for the engine thread, on the side of the event loop."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from backend.engine.command import answer
from backend.engine.stream import Publication, TokenStream
from backend.errors import BackendError

Result = TypeVar("Result")


class Callers:
    """Requests wait for their events, and everybody else for one reply; on one event loop.

    Attributes:
        streams: By the id of their request, until its caller has left.
        side_jobs: How many embeddings and scores are waited for.
    """

    def __init__(self) -> None:
        self.streams: dict[str, TokenStream] = {}
        self.side_jobs = 0
        self._replies: set[Future[Any]] = set()
        self._have_left = asyncio.Event()
        self._have_left.set()

    def enter(self, request_id: str) -> TokenStream:
        """Return the stream of a new request."""
        stream = self.streams[request_id] = TokenStream()
        self._have_left.clear()
        return stream

    def leave(self, request_id: str) -> bool:
        """Forget a request; tell whether it was known, and had not ended."""
        stream = self.streams.pop(request_id, None)
        self._note_who_is_left()
        return stream is not None and not stream.has_ended

    def deliver(self, publications: Sequence[Publication]) -> None:
        """Hand events to those who are still there."""
        for publication in publications:
            if stream := self.streams.get(publication.request_id):
                stream.deliver(publication.event)

    def expect(self, reply: "Future[Result]") -> "asyncio.Future[Result]":
        """Return what can be awaited for a reply; cancelling it cancels the reply."""
        self._replies.add(reply)
        expected = asyncio.wrap_future(reply)
        expected.add_done_callback(lambda _: self._replies.discard(reply))
        return expected

    async def expect_beside(self, reply: "Future[Result]") -> Result:
        """Return the reply of a job beside generation."""
        self.side_jobs += 1
        self._have_left.clear()
        try:
            return await self.expect(reply)
        finally:
            self.side_jobs -= 1
            self._note_who_is_left()

    def fail_all(self, reason: BackendError) -> None:
        """End what everybody waits for."""
        for reply in list(self._replies):
            answer(reply, reason)
        for stream in self.streams.values():
            if not stream.has_ended:
                stream.deliver(reason)

    async def have_left(self, timeout_s: float) -> None:
        """Wait until no request and no job is left, or for as long as that."""
        try:
            await asyncio.wait_for(self._have_left.wait(), timeout_s)
        except TimeoutError:
            return

    def _note_who_is_left(self) -> None:
        if not self.streams and not self.side_jobs:
            self._have_left.set()
