"""The open calls, with everything that another engine process needs to resume them."""

import asyncio
import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from backend.core.request import GenerationRequest
from backend.core.step import PrefillDone, TokenStep
from backend.engine.messages.commands import SessionRequest, Submit
from backend.engine.messages.failure import Failure
from backend.engine.messages.protocol import Job, Passing, PrepareMedium
from backend.engine.messages.stream import Publication, TokenStream
from backend.errors import BackendError, GenerationFailedError

MAX_LOSSES = 2


@dataclass(eq=False, slots=True)
class OpenRequest:
    """A request and its reply so far.

    Attributes:
        generated: Tokens delivered to the stream.
        is_prefilled: Whether the stream has the end of the prefill.
        is_sent: Whether the present engine process has it.
        losses: Number of processes in a row lost over it without a token in between.
        has_left: Whether its caller is gone.
    """

    request: GenerationRequest
    stream: TokenStream = field(default_factory=TokenStream)
    generated: list[int] = field(default_factory=list)
    is_prefilled: bool = False
    is_sent: bool = False
    losses: int = 0
    has_left: bool = False

    @property
    def is_open(self) -> bool:
        """Whether more of its reply is due, and its caller waits."""
        return not self.stream.has_ended and not self.has_left

    def order(self) -> Submit:
        """Return the order that lets a process resume it."""
        return Submit(self.request, tuple(self.generated))

    def note(self, event: PrefillDone | TokenStep | Failure) -> None:
        """Deliver an event to the stream."""
        match event:
            case PrefillDone():
                # A repeated prefill is not an event.
                if self.is_prefilled:
                    return
                self.is_prefilled = True
            case TokenStep(token_id):
                self.generated.append(token_id)
                self.losses = 0
        self.stream.deliver(event.error() if isinstance(event, Failure) else event)

    def fail(self, error: BackendError) -> None:
        """End the stream with an error."""
        if self.is_open:
            self.stream.deliver(error)


@dataclass(eq=False, slots=True)
class OpenJob:
    """Work with a waiting caller; the attributes are those of `OpenRequest`."""

    number: int
    request: SessionRequest | PrepareMedium
    reply: "asyncio.Future[Any]"
    is_sent: bool = False
    losses: int = 0
    has_left: bool = False

    @property
    def is_open(self) -> bool:
        """Whether it has no result yet, and its caller waits."""
        return not self.reply.done() and not self.has_left

    def order(self) -> Job:
        """Return the order for it."""
        return Job(self.number, self.request)

    def fail(self, error: BackendError) -> None:
        """End it with an error."""
        if self.is_open:
            self.reply.set_exception(copy(error))


OpenCall = OpenRequest | OpenJob


class Ledger:
    """All open calls, in the order of their arrival; on one event loop.

    Attributes:
        requests: By their ids.
        jobs: By their numbers.
        preparing: Ids of requests on their way to the engine.
    """

    def __init__(self) -> None:
        self.requests: dict[str, OpenRequest] = {}
        self.jobs: dict[int, OpenJob] = {}
        self.preparing: list[str] = []
        self._numbers = itertools.count(1)
        self._have_left = asyncio.Event()
        self._have_left.set()

    @property
    def background_jobs(self) -> int:
        """The number of open embeddings and scores."""
        return sum(not isinstance(job.request, PrepareMedium) for job in self.jobs.values())

    @property
    def awaits_turn(self) -> bool:
        """Whether the engine process has work for its turns; from any thread."""
        requests, jobs = list(self.requests.values()), list(self.jobs.values())
        return any(each.is_sent and each.is_open for each in requests) or any(
            job.is_sent and not isinstance(job.request, PrepareMedium) for job in jobs
        )

    def calls(self) -> Iterator[OpenCall]:
        """Yield all open calls."""
        yield from (each for each in self.requests.values() if each.is_open)
        yield from (job for job in self.jobs.values() if job.is_open)

    def enter(self, request: GenerationRequest) -> OpenRequest:
        """Open a request."""
        entry = self.requests[request.request_id] = OpenRequest(request)
        self._have_left.clear()
        return entry

    @contextmanager
    def preparation(self, request_id: str) -> Iterator[None]:
        """Count a request on its way to the engine."""
        self.preparing.append(request_id)
        self._have_left.clear()
        try:
            yield
        finally:
            self.preparing.remove(request_id)
            self._note_who_is_left()

    def leave(self, request_id: str) -> OpenRequest | None:
        """Forget a request; return it if it was known."""
        entry = self.requests.pop(request_id, None)
        if entry is not None:
            entry.has_left = True
        self._note_who_is_left()
        return entry

    def enter_job(self, request: SessionRequest | PrepareMedium) -> OpenJob:
        """Open a job."""
        reply = asyncio.get_running_loop().create_future()
        job = OpenJob(next(self._numbers), request, reply)
        self.jobs[job.number] = job
        self._have_left.clear()
        return job

    def leave_job(self, job: OpenJob) -> None:
        """Forget a job."""
        self.jobs.pop(job.number, None)
        job.has_left = True
        self._note_who_is_left()

    def note(self, publications: Sequence[Publication]) -> None:
        """Deliver events to open requests."""
        for each in publications:
            if entry := self.requests.get(each.request_id):
                entry.note(each.event)

    def fail_all(self, reason: BackendError) -> None:
        """End all open calls."""
        for call in list(self.calls()):
            call.fail(reason)

    def note_loss(
        self, passing: Passing | None, compiling: Collection[str], reason: BackendError
    ) -> Collection[OpenCall]:
        """Count the calls that may have cost a process; fail and return repeat offenders.

        Args:
            passing: The pass that it was in, if any.
            compiling: Requests for which it compiled grammars.
            reason: The loss.
        """
        for call in self.calls():
            call.losses += call.is_sent and _was_in(call, passing, compiling)
            call.is_sent = False
        culprits = [call for call in self.calls() if call.losses >= MAX_LOSSES]
        for call in culprits:
            call.fail(
                GenerationFailedError(
                    f"the engine was lost {MAX_LOSSES} times in a row over this request: {reason}"
                )
            )
        return culprits

    async def have_left(self, timeout_s: float) -> None:
        """Wait until no call is open, up to the timeout."""
        try:
            await asyncio.wait_for(self._have_left.wait(), timeout_s)
        except TimeoutError:
            return

    def _note_who_is_left(self) -> None:
        if not self.requests and not self.jobs and not self.preparing:
            self._have_left.set()


def _was_in(call: OpenCall, passing: Passing | None, compiling: Collection[str]) -> bool:
    """Tell whether a process may have been lost over a call: in the pass, or alongside it.

    Grammars are compiled and media prepared on other threads.
    """
    match call:
        case OpenRequest(request):
            passed = passing.requests if passing else ()
            return request.request_id in passed or request.request_id in compiling
        case OpenJob(_, PrepareMedium()):
            return True
        case OpenJob():
            return passing is not None and passing.has_job
