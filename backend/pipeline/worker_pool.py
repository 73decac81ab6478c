"""Threads for work that would block the event loop.

Lanes keep apart light, heavy and media work, and the decoding of requests. In each, callers take
turns, and the queue is limited in number and bytes. Work whose caller has left is dropped before it
starts; running work ends at its next `require_caller`.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from backend.config import (
    DECODING_THREADS,
    HEAVY_THREADS,
    LIGHT_THREADS,
    LIGHT_WORK_BYTES,
    MAX_QUEUED_WORK,
    MAX_QUEUED_WORK_BYTES,
    MEDIA_THREADS,
    WORK_TURN_S,
)
from backend.errors import OverloadedError
from common.rpc import enter_work, present_peer

# Of work on token ids, as callers count its size.
BYTES_PER_ID = 8


Result = TypeVar("Result")


class _Work:
    """A function whose caller may leave."""

    def __init__(self, function: Callable[[], Any], size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.peer = present_peer()
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.abandoned = threading.Event()
        self._context = copy_context()
        self._context.run(enter_work, self.abandoned)
        self._function = function

    def run(self) -> object:
        return self._context.run(self._function)


@dataclass(eq=False, slots=True)
class Lane:
    """Threads for one kind of work; belongs to one event loop.

    Attributes:
        free: Number of threads that this lane may still occupy.
        max_bytes: Size limit of queued and running work; a single piece may exceed it.
    """

    threads: ThreadPoolExecutor
    free: int
    max_waiting: int = MAX_QUEUED_WORK
    max_bytes: int = MAX_QUEUED_WORK_BYTES
    _waiting: dict[str, deque[_Work]] = field(default_factory=dict)
    _count: int = 0
    _bytes: int = 0

    def move_to(self, threads: ThreadPoolExecutor) -> None:
        """Replace the threads: the present ones finish their running work and end."""
        self.threads.shutdown(wait=False)
        self.threads = threads

    async def run(self, function: Callable[[], Result], size_bytes: int) -> Result:
        """Run a function on a thread and return its result.

        Args:
            function: Must not touch the event loop.

        Raises:
            OverloadedError: The queue is full.
        """
        work = self._admit(function, size_bytes)
        self._start()
        try:
            result: Result = await work.result
            return result
        finally:
            work.abandoned.set()
            self._withdraw(work)

    def _admit(self, function: Callable[[], Result], size_bytes: int) -> _Work:
        is_large = self._bytes and self._bytes + size_bytes > self.max_bytes
        if self._count >= self.max_waiting or is_large:
            raise OverloadedError(
                f"{self._count} calls of {self._bytes >> 20} MiB wait to be prepared: try later"
            )
        work = _Work(function, size_bytes)
        self._waiting.setdefault(work.peer, deque()).append(work)
        self._count += 1
        self._bytes += size_bytes
        return work

    def _start(self) -> None:
        while self.free and self._waiting:
            work = self._next()
            self.free -= 1
            ended = asyncio.get_running_loop().run_in_executor(self.threads, work.run)
            ended.add_done_callback(partial(self._end, work))

    def _next(self) -> _Work:
        """Take the first work of the caller whose turn it is, and move that caller to the end."""
        peer = next(iter(self._waiting))
        queue = self._waiting.pop(peer)
        work = queue.popleft()
        if queue:
            self._waiting[peer] = queue
        self._count -= 1
        return work

    def _end(self, work: _Work, ended: "asyncio.Future[Any]") -> None:
        self.free += 1
        self._bytes -= work.size_bytes
        if not ended.cancelled():
            # Also for abandoned work: its error must not be reported as never retrieved.
            error = ended.exception()
            if work.result.done():
                pass
            elif error is not None:
                work.result.set_exception(error)
            else:
                work.result.set_result(ended.result())
        self._start()

    def _withdraw(self, work: _Work) -> None:
        queue = self._waiting.get(work.peer)
        if queue is not None and work in queue:
            queue.remove(work)
            self._count -= 1
            self._bytes -= work.size_bytes
            if not queue:
                del self._waiting[work.peer]


_DECODING = "decoding"
_THREADS = {"light": LIGHT_THREADS, "heavy": HEAVY_THREADS, "media": MEDIA_THREADS}
_ALL_THREADS = {**_THREADS, _DECODING: DECODING_THREADS}


class _Lanes:
    """The lanes of the running event loop, by name: a process may have several in succession."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lanes: dict[str, Lane] = {}

    def __getitem__(self, name: str) -> Lane:
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._loop = loop
            self._lanes = {n: Lane(_new_threads(n, c), c) for n, c in _ALL_THREADS.items()}
        return self._lanes[name]


def _new_threads(name: str, count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix=name)


_lanes = _Lanes()


async def run(work: Callable[[], Result], *, size_bytes: int, reads_media: bool = False) -> Result:
    """Run work on a thread and return its result; cancel to abandon it.

    Args:
        work: Must not touch the event loop.
        size_bytes: Size of its input; decides between the light and the heavy lane.

    Raises:
        OverloadedError: The queue is full.
    """
    by_size = "light" if size_bytes <= LIGHT_WORK_BYTES else "heavy"
    return await _lanes["media" if reads_media else by_size].run(work, size_bytes)


async def run_in_turns(parts: Iterator[Result], *, size_bytes: int) -> list[Result]:
    """Return all parts; each is made on a thread, which others have now and then meanwhile.

    Args:
        parts: Makes them; otherwise as for `run`.
    """
    made: list[Result] = []
    while await run(partial(_take_turn, parts, made), size_bytes=size_bytes):
        pass
    return made


def _take_turn(parts: Iterator[Result], made: list[Result]) -> bool:
    """Make parts until the turn is over; tell whether there may be more."""
    ends_at = time.monotonic() + WORK_TURN_S
    for part in parts:
        made.append(part)
        if time.monotonic() >= ends_at:
            return True
    return False


async def run_decoding(work: Callable[[], Result], *, size_bytes: int) -> Result:
    """Decode a request on the thread for that, as `run` does other work."""
    return await _lanes[_DECODING].run(work, size_bytes)


def renew_threads() -> None:
    """Continue on new threads; call it after a model is unloaded.

    A tokenizer keeps a cache of texts, up to 4 MB, for each thread that used it. Only the end of
    the thread frees it.
    """
    for name, count in _THREADS.items():
        _lanes[name].move_to(_new_threads(name, count))
