"""A child process for work that might never end: it takes jobs from a socket, and can be killed.

An ended process raises `ProcessEndedError`, and one that is late `TooLateError`. A `HelperPool`
keeps some of them: few jobs wait for a start.
"""

import logging
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from common.process import tied
from common.rpc import AbandonedError, require_caller

LENGTH = struct.Struct("<Q")
# A new process spends a second or more on imports.
START_S = 60.0
# Interval for checking that the caller still waits.
POLL_S = 0.1
_CHUNK_BYTES = 2**20
# The children ignore them, or are killed.
_SIGNALS_FROM_OUTSIDE = frozenset({-signal.SIGKILL, -signal.SIGTERM})
# How long a process that has closed its socket may take to end.
_END_S = 0.25

log = logging.getLogger(__name__)


class HelperError(Exception):
    """A process has no answer to a job.

    Attributes:
        was_killed: Whether somebody else ended it, so that its job may not be the reason.
    """

    def __init__(self, *, was_killed: bool = False) -> None:
        super().__init__()
        self.was_killed = was_killed


class ProcessEndedError(HelperError):
    """The process has ended."""


class TooLateError(HelperError):
    """The time limit was exceeded."""


def no_reader_required() -> None:
    """Go on although the caller may have gone."""


def start_python(
    module: str, number: int, *, is_heard: bool = False, niceness: int = 0
) -> subprocess.Popen[bytes]:
    """Start the `main` of a module with a file descriptor that it inherits.

    Args:
        is_heard: Whether its stderr is this process's.
        niceness: How much lower its priority is than this process's, from its first import on.
    """
    code = (
        f"import os, sys; os.nice({niceness}); sys.path[:] = {sys.path!r}; "
        f"from {module} import main; main({number})"
    )
    return tied(
        lambda descriptors: subprocess.Popen(  # noqa: S603 (our own program)
            [sys.executable, "-c", code],
            pass_fds=[number, *descriptors],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if is_heard else subprocess.DEVNULL,
        )
    )


class HelperProcess:
    """One process and its socket; used by one thread at a time.

    Jobs and answers are frames: their length, then their bytes. An empty-handed first answer says
    that the process has started.

    Attributes:
        is_guarded: Whether a pool waits for its end.
    """

    def __init__(
        self, start: Callable[[int], subprocess.Popen[bytes]], *, max_answer_bytes: int
    ) -> None:
        """Start the process.

        Args:
            max_answer_bytes: A process that announces more is taken for ended.
        """
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = start(theirs.fileno())
        self._socket.settimeout(0.0)
        self._max_answer_bytes = max_answer_bytes
        self._is_ready = False
        self._unread = bytearray()
        self.is_guarded = False

    @property
    def is_alive(self) -> bool:
        """Whether it is running."""
        return self.process.poll() is None

    def await_start(self) -> None:
        """Wait until the process has finished its imports.

        Raises:
            ProcessEndedError: It has ended, or takes too long.
        """
        if not self._is_ready:
            try:
                self.receive_start(time.monotonic() + START_S)
            except TooLateError as error:
                # Its job is not the reason.
                raise ProcessEndedError(was_killed=True) from error
            self._is_ready = True

    def receive_start(self, deadline: float) -> None:
        """Take the answers that come before any job."""
        self.receive(deadline)

    def await_end(self) -> None:
        """Wait until the process has closed its socket, or was killed here."""
        poll = select.poll()
        with suppress(ValueError):  # closed on this side
            # The end alone: others read its answers.
            poll.register(self._socket, 0)
            poll.poll()

    def send(self, data: bytes, deadline: float) -> None:
        """Send a frame, whole even if the caller leaves."""
        left = memoryview(LENGTH.pack(len(data)) + data)
        while left:
            self._wait(select.POLLOUT, deadline, no_reader_required)
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._ended() from error

    def receive(
        self, deadline: float, require_reader: Callable[[], None] = require_caller
    ) -> bytes:
        """Return the next frame; after an error its first part is kept for another try.

        Args:
            deadline: By the monotonic clock.
            require_reader: Raises if nobody waits for the answer any more.

        Raises:
            AbandonedError: The caller has gone.
        """
        self._read(LENGTH.size, deadline, require_reader)
        (length,) = LENGTH.unpack_from(self._unread)
        if length > self._max_answer_bytes:
            raise ProcessEndedError(was_killed=False)
        self._read(LENGTH.size + length, deadline, require_reader)
        with memoryview(self._unread) as frame:
            data = bytes(frame[LENGTH.size :])
        self._unread = bytearray()
        return data

    def kill(self) -> None:
        """Kill the process."""
        self._socket.close()
        self.process.kill()
        self.process.wait()

    def _read(self, count: int, deadline: float, require_reader: Callable[[], None]) -> None:
        """Read until so many bytes of an answer are there."""
        while (missing := count - len(self._unread)) > 0:
            self._wait(select.POLLIN, deadline, require_reader)
            try:
                chunk = self._socket.recv(min(missing, _CHUNK_BYTES))
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._ended() from error
            if not chunk:
                raise self._ended()
            self._unread += chunk

    def _ended(self) -> ProcessEndedError:
        """Return the error for a process that has closed its socket."""
        try:
            status = self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            status = 0
        return ProcessEndedError(was_killed=status in _SIGNALS_FROM_OUTSIDE)

    def _wait(self, event: int, deadline: float, require_reader: Callable[[], None]) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        while True:
            require_reader()
            left = deadline - time.monotonic()
            if left <= 0:
                raise TooLateError
            if poll.poll(min(left, POLL_S) * 1000):
                return


_ProcessT = TypeVar("_ProcessT", bound=HelperProcess)
_AnswerT_co = TypeVar("_AnswerT_co", covariant=True)


class Conversation(Protocol[_AnswerT_co]):
    """One job of a process.

    Attributes:
        owed: How many answers are still to come; a process that owes none takes another job.
    """

    owed: int

    def held(self) -> _AnswerT_co:
        """Send the job, and return the answer."""

    def finish(self, deadline: float) -> None:
        """Wait for the answers that nobody wants any more, until a time."""


class Question:
    """A job with one answer."""

    def __init__(self, process: HelperProcess, data: bytes, limit_s: float) -> None:
        self._process = process
        self._data = data
        self._limit_s = limit_s
        self.owed = 0

    def held(self) -> bytes:
        """Send the job, and return the answer."""
        deadline = time.monotonic() + self._limit_s
        self.owed = 1
        self._process.send(self._data, deadline)
        answer = self._process.receive(deadline)
        self.owed = 0
        return answer

    def finish(self, deadline: float) -> None:
        """Wait for the answer that nobody wants any more, until a time."""
        if self.owed:
            with suppress(HelperError):
                self._process.receive(deadline, no_reader_required)
                self.owed = 0


class HelperPool(Generic[_ProcessT]):
    """A few processes, started on demand; used from any thread. Those in `idle` have no job.

    A job that finds none idle takes the first that is free, be it one that another job has finished
    with or one that has just started.
    """

    def __init__(
        self,
        count: int,
        *,
        grace_s: float = 0.0,
        retries_ended: bool = False,
        replaces_idle: bool = False,
    ) -> None:
        """Start with no process.

        Args:
            count: Maximum number of processes with a job.
            grace_s: How long a process may finish a job whose caller has gone, rather than be
                started anew.
            retries_ended: Whether a job gets a fresh process after any end, for which other jobs
                may be the reason, and not only if somebody else killed the process.
            replaces_idle: Whether another process takes the place of an idle one that has ended,
                before a job needs it. The `start` of a job is kept as long as its process lives.
        """
        self.idle: list[_ProcessT] = []
        self._count = count
        self._replaces_idle = replaces_idle
        self._grace_s = grace_s
        self._retries_ended = retries_ended
        self._room = threading.Semaphore(count)
        # Guards the idle ones and the numbers: of those that start, of jobs, of calls of `close`.
        # Notified when a job need not wait any longer.
        self._changed = threading.Condition()
        self._starting = self._busy = self._closed = 0

    def prepare(self, start: Callable[[], _ProcessT]) -> None:
        """Start a process on a thread of its own; the first job that finds none idle takes it."""
        with self._changed:
            self._begin(start)

    def run(
        self,
        start: Callable[[], _ProcessT],
        begin: Callable[[_ProcessT], Conversation[_AnswerT_co]],
    ) -> _AnswerT_co:
        """Return the answer to a job.

        Args:
            start: Starts a process.
            begin: Prepares the conversation of the job with a process.

        Raises:
            TooLateError: The limit was exceeded.
            ProcessEndedError: The process ended, and possibly a fresh one too; or none can start.
            AbandonedError: The caller has gone.
        """
        while not self._room.acquire(timeout=POLL_S):
            require_caller()
        try:
            return self._attempt(self._free_one(start) or _started(start), start, begin)
        except ProcessEndedError as error:
            if not (error.was_killed or self._retries_ended):
                raise
            return self._attempt(_started(start), start, begin)
        finally:
            self._room.release()

    def close(self) -> None:
        """Kill the idle processes, and as soon as they have started those that start."""
        with self._changed:
            self._closed += 1
            kill_all(self.idle)

    def _free_one(self, start: Callable[[], _ProcessT]) -> _ProcessT | None:
        """Return the first process that is free; none if there is nothing to wait for."""
        has_begun = False
        while True:
            with self._changed:
                while self.idle:
                    if (process := self.idle.pop()).is_alive:
                        return process
                    process.kill()
                if not (self._starting or self._busy):
                    return None
                if not (self._starting or has_begun):
                    # If it does not start, another try would fail too.
                    self._begin(start)
                    has_begun = True
                self._changed.wait(POLL_S)
            require_caller()

    def _attempt(
        self,
        process: _ProcessT,
        start: Callable[[], _ProcessT],
        begin: Callable[[_ProcessT], Conversation[_AnswerT_co]],
    ) -> _AnswerT_co:
        talk, is_lost = begin(process), False
        self._count_busy(1)
        try:
            process.await_start()
            return talk.held()
        except AbandonedError:
            talk.finish(time.monotonic() + self._grace_s)
            raise
        except HelperError:
            is_lost = True
            raise
        finally:
            if is_lost or talk.owed:
                process.kill()
            else:
                self._keep(process)
                self._guard(process, start)
            self._count_busy(-1)

    def _count_busy(self, change: int) -> None:
        with self._changed:
            self._busy += change
            self._changed.notify_all()

    def _keep(self, process: _ProcessT, closed: int | None = None) -> None:
        """Let a process wait for a job, unless there are enough, or it began before a `close`."""
        with self._changed:
            if closed in (None, self._closed) and len(self.idle) < self._count:
                self.idle.append(process)
                self._changed.notify_all()
                return
        process.kill()

    def _begin(self, start: Callable[[], _ProcessT]) -> None:
        """Start a process on a thread; the caller holds the lock."""
        self._starting += 1
        arguments = (start, self._closed)
        threading.Thread(target=self._add, args=arguments, daemon=True, name="start").start()

    def _add(self, start: Callable[[], _ProcessT], closed: int) -> None:
        try:
            process = _started(start)
            try:
                process.await_start()
            except BaseException:
                process.kill()
                raise
            self._keep(process, closed)
        except HelperError as error:
            # A job that waits for it starts one itself, and learns why that is impossible.
            log.debug("a helper process did not start: %r", error)
        finally:
            with self._changed:
                self._starting -= 1
                self._changed.notify_all()

    def _guard(self, process: _ProcessT, start: Callable[[], _ProcessT]) -> None:
        """Have a process replaced that ends while it is idle; its successor only after a job."""
        if self._replaces_idle and not process.is_guarded:
            process.is_guarded = True
            threading.Thread(
                target=self._replace_once_ended, args=(process, start), daemon=True, name="guard"
            ).start()

    def _replace_once_ended(self, process: _ProcessT, start: Callable[[], _ProcessT]) -> None:
        process.await_end()
        with self._changed:
            try:
                self.idle.remove(process)
            except ValueError:
                # It has a job, which starts another, or the pool has killed it.
                return
            self._begin(start)
        process.kill()


def _started(start: Callable[[], _ProcessT]) -> _ProcessT:
    """Start a process; the system's limits may not allow it now, which is no fault of its job."""
    try:
        return start()
    except OSError as error:
        log.warning("a helper process cannot be started: %s", error)
        raise ProcessEndedError(was_killed=True) from error


def kill_all(processes: list[_ProcessT]) -> None:
    """Kill processes, and empty their list."""
    while processes:
        processes.pop().kill()
