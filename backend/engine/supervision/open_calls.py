"""The open calls, with everything that another engine process needs to resume them.

A new process gets the suspects of the last loss one by one: when it ends again, only one call has
made no progress since.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeAlias

from backend.core.request import GenerationRequest
from backend.core.step import Steps
from backend.engine.messages.codec import WireError
from backend.engine.messages.protocol import (
    Cancel,
    Failure,
    Job,
    Leave,
    Order,
    Passing,
    PrepareMedium,
    Result,
    SessionRequest,
    Submit,
    Told,
)
from backend.engine.supervision.engine_process import EngineProcess
from backend.errors import BackendError, GenerationFailedError, InvalidRequestError

MAX_LOSSES = 2


class OpenRequest(AsyncIterator[Steps]):
    """A request and its reply so far.

    It yields all steps since the last look, together. It ends after the last step; an error is
    raised after the steps before it.

    Attributes:
        losses: Number of processes in a row lost over it without a token in between.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.generated: list[int] = []
        self.has_ended = False
        self.is_sent = False
        self.losses = 0
        self.has_left = False
        self._is_prefilled = False
        self._steps: Steps | None = None
        self._error: BackendError | None = None
        self._arrival = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether more of its reply is due, and its caller waits."""
        return not (self.has_ended or self.has_left)

    def order(self) -> Submit:
        """Return the order that lets a process resume it."""
        return Submit(self.request, tuple(self.generated), self.losses)

    def note(self, steps: Steps) -> None:
        """Take over steps for its reader."""
        if steps.prefill is not None:
            if self._is_prefilled:
                # That of another process is not the reader's business.
                steps.prefill = None
            self._is_prefilled = True
        if steps.token_ids:
            self.generated += steps.token_ids
            self.losses = 0
        self.has_ended = steps.finish_reason is not None
        if self._steps is None:
            self._steps = steps
        else:
            self._steps.extend(steps)
        self._arrival.set()

    def fail(self, error: BackendError) -> None:
        """End it with an error."""
        if self.is_open:
            self._error, self.has_ended = error, True
            self._arrival.set()

    async def __anext__(self) -> Steps:
        while self._steps is None and not self.has_ended:
            self._arrival.clear()
            await self._arrival.wait()
        if self._steps is not None:
            steps, self._steps = self._steps, None
            return steps
        if self._error is not None:
            raise copy(self._error)
        raise StopAsyncIteration


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


OpenCall: TypeAlias = OpenRequest | OpenJob


class OpenCalls:
    """All open calls, in the order of their arrival; on one event loop.

    Attributes:
        process: Gets them; without one they wait for the next.
    """

    def __init__(self) -> None:
        self.process: EngineProcess | None = None
        self.requests: dict[str, OpenRequest] = {}
        self.jobs: dict[int, OpenJob] = {}
        self.preparing: list[str] = []
        self._numbers = itertools.count(1)
        self._have_left = asyncio.Event()
        self._have_left.set()
        self._suspects: deque[OpenCall] = deque()
        self._tried: OpenCall | None = None
        # Whether the process has all of them, so that a new one may be sent at once.
        self._are_sent = False

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

    def __iter__(self) -> Iterator[OpenCall]:
        """Yield those that wait for a result."""
        yield from (each for each in self.requests.values() if each.is_open)
        yield from (job for job in self.jobs.values() if job.is_open)

    @contextmanager
    def preparation(self, request_id: str) -> Iterator[None]:
        """Count a request on its way to the engine."""
        self.preparing.append(request_id)
        self._have_left.clear()
        try:
            yield
        finally:
            self.preparing.remove(request_id)
            self._note_departure()

    def submit(self, request: GenerationRequest) -> OpenRequest:
        """Open a request, and give it to the process."""
        call = self.requests[request.request_id] = OpenRequest(request)
        self._have_left.clear()
        if self._are_sent:
            self._give(call)
        return call

    def cancel(self, request_id: str) -> None:
        """Forget a request whose caller has left; harmless if it is unknown."""
        if (call := self.requests.pop(request_id, None)) is None:
            return
        call.has_left = True
        if call.is_sent and not call.has_ended:
            self.tell(Cancel(request_id))
        self._note_departure()

    async def compute(self, request: SessionRequest | PrepareMedium) -> Any:  # noqa: ANN401
        """Return the result of a job; cancelling this drops it."""
        reply = asyncio.get_running_loop().create_future()
        job = OpenJob(next(self._numbers), request, reply)
        self.jobs[job.number] = job
        self._have_left.clear()
        if self._are_sent:
            self._give(job)
        try:
            return await reply
        finally:
            del self.jobs[job.number]
            job.has_left = True
            if job.is_sent and (reply.cancelled() or not reply.done()):
                self.tell(Leave(job.number))
            self._note_departure()

    def tell(self, order: Order) -> None:
        """Send the process an order, which another process would not get."""
        if self.process is not None:
            self.process.send(order)

    def note(self, told: Told) -> None:
        """Give requests their steps and their errors."""
        for request_id, steps in told.steps.items():
            if (call := self.requests.get(request_id)) is not None:
                call.note(steps)
        for request_id, failure in told.failures.items():
            if (call := self.requests.get(request_id)) is not None:
                call.fail(failure.error())
        if not self._are_sent:
            self._advance()

    def note_result(self, number: int, result: Result | Failure) -> None:
        """Give a job its result, or the error that ends it."""
        job = self.jobs.get(number)
        if job is not None and job.is_open:
            if isinstance(result, Failure):
                job.fail(result.error())
            else:
                job.reply.set_result(result)
        self._advance()

    def begin(self, process: EngineProcess) -> None:
        """Give a new process the open calls: first the suspects, then all others."""
        self.process, self._are_sent = process, False
        self._suspects = deque(call for call in self if call.losses)
        self._tried = None
        self._advance()

    def pause(self) -> EngineProcess | None:
        """Hold calls back from now on; return the process, which is gone or will be."""
        process, self.process = self.process, None
        self._are_sent = False
        return process

    def fail_all(self, reason: BackendError) -> None:
        """End all open calls."""
        for call in list(self):
            call.fail(reason)

    def note_loss(
        self, passing: Passing | None, compiling: Collection[str], reason: BackendError
    ) -> Collection[OpenCall]:
        """Count the calls that may have cost a process; fail and return repeat offenders."""
        for call in self:
            call.losses += call.is_sent and _was_in(call, passing, compiling)
            call.is_sent = False
        culprits = [call for call in self if call.losses >= MAX_LOSSES]
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

    def _note_departure(self) -> None:
        if not self.requests and not self.jobs and not self.preparing:
            self._have_left.set()
        self._advance()

    def _advance(self) -> None:
        """Continue when the last suspect has made progress, or has left."""
        if self.process is None or self._are_sent:
            return
        while not (self._tried and self._tried.is_open and self._tried.losses):
            if not self._suspects:
                self._tried, self._are_sent = None, True
                for call in list(self):
                    if not call.is_sent:
                        self._give(call)
                return
            self._tried = self._suspects.popleft()
            if self._tried.is_open:
                self._give(self._tried)

    def _give(self, call: OpenCall) -> None:
        if self.process is None:
            return
        if not self.awaits_turn:
            # It had no reason to send messages until now.
            self.process.silent_since = time.monotonic()
        try:
            self.process.send(call.order())
        except WireError as error:
            call.fail(InvalidRequestError("the request", str(error)))
        call.is_sent = True


def _was_in(call: OpenCall, passing: Passing | None, compiling: Collection[str]) -> bool:
    """Tell whether a process may have been lost over a call: in the pass, or alongside it.

    Grammars are compiled and media prepared on other threads.
    """
    match call:
        case OpenRequest(request=request):
            passed = passing.requests if passing else ()
            return request.request_id in passed or request.request_id in compiling
        case OpenJob(_, PrepareMedium()):
            return True
        case OpenJob():
            return passing is not None and passing.has_job
