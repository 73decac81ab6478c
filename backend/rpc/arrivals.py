"""Receives requests, and gives up those that do not arrive: the oldest of too many, the late ones.

gRPC keeps the part of a message that has arrived, up to the limit of a whole one, until its call
ends. A caller that sends a part of each of many requests would fill the memory. gRPC receives the
only request of a call before the call can be ended; so all calls are answered as those whose
requests are a stream.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from backend.config import ARRIVAL_GRACE_S, ARRIVAL_TIMEOUT_S, MAX_ARRIVING, MAX_METADATA
from common.machine_memory import Heap
from common.rpc import Context, Continuation, FoundHandler, abort, received

_GIVEN_UP = "the request has not arrived in full in time"
_MISSING = "the call has no request"


@dataclass(eq=False, slots=True)
class _Arrival:
    """A task that waits for its request since a time of the event loop."""

    task: "asyncio.Task[Any]"
    since: float
    is_given_up: bool = False


@dataclass(kw_only=True)
class ArrivalInterceptor(grpc.aio.ServerInterceptor):
    """Bounds the requests that are arriving; belongs to one event loop.

    Attributes:
        most: How many requests may take longer than the grace time at once.
        grace_s: A request has this time in any case, and at most as long again.
        timeout_s: Time after which a request is given up.
    """

    most: int = MAX_ARRIVING
    grace_s: float = ARRIVAL_GRACE_S
    timeout_s: float = ARRIVAL_TIMEOUT_S
    # As a set, in order of their start.
    _arrivals: dict[_Arrival, None] = field(default_factory=dict)
    _will_look: bool = False
    _heap: Heap = field(default_factory=Heap)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> FoundHandler:
        """Have a handler of one request receive it here."""
        if len(handler_call_details.invocation_metadata) > MAX_METADATA:
            # gRPC has refused the call, and its memory is free, but not the system's.
            self._heap.trim_soon()
        handler = await continuation(handler_call_details)
        return handler and received(handler, self._received)

    async def _received(self, context: Context) -> object:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("gRPC answers each call in a task")
        arrival = _Arrival(task, task.get_loop().time())
        self._arrivals[arrival] = None
        self._look_later()
        try:
            request: object = await context.read()
        except asyncio.CancelledError:
            if not arrival.is_given_up:
                raise
            task.uncancel()
            await abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, _GIVEN_UP)
        finally:
            self._arrivals.pop(arrival, None)
        if request is grpc.aio.EOF:
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, _MISSING)
        return request

    def _look_later(self) -> None:
        if not self._will_look:
            self._will_look = True
            asyncio.get_running_loop().call_later(self.grace_s, self._look)

    def _look(self) -> None:
        """Give up the requests that take too long; the oldest come first."""
        self._will_look = False
        now = asyncio.get_running_loop().time()
        for arrival in list(self._arrivals):
            limit_s = self.grace_s if len(self._arrivals) > self.most else self.timeout_s
            if now - arrival.since < limit_s:
                break
            del self._arrivals[arrival]
            arrival.is_given_up = True
            arrival.task.cancel()
        if self._arrivals:
            self._look_later()
