"""A time limit for foreign code: a chat template is a program, and may loop.

Code that runs too long gets an exception raised inside it, as soon as its thread runs Python
code again (https://docs.python.org/3/c-api/threads.html#c.PyThreadState_SetAsyncExc).
"""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

POLL_INTERVAL_S = 0.1
# Any pending exception is raised in one of the first steps.
ARRIVAL_STEPS = 100

Result = TypeVar("Result")


class TimeLimitError(BaseException):
    """The time is up. Not an `Exception`, so that the interrupted code does not catch it."""


class TimeLimit:
    """Limits the time of calls from any thread; a watcher thread runs while there are calls.

    It uses only plain locks, which an asynchronous exception cannot leave locked.
    """

    def __init__(self, seconds: float) -> None:
        """Start with no calls.

        Args:
            seconds: Time limit of a call.
        """
        self.seconds = seconds
        self._lock = threading.Lock()
        self._deadlines: dict[int, float] = {}
        self._is_watching = False

    def run(self, work: Callable[[], Result]) -> Result:
        """Return the result of the work, which must not use the same limit recursively.

        Raises:
            TimeLimitError: It takes too long.
        """
        thread_id = threading.get_ident()
        self._begin(thread_id)
        try:
            return work()
        finally:
            with self._lock:
                is_due = self._deadlines.pop(thread_id, None) is None
            if is_due:
                _await_arrival()

    def _begin(self, thread_id: int) -> None:
        with self._lock:
            if not self._is_watching:
                threading.Thread(target=self._watch, name="time-limit", daemon=True).start()
                self._is_watching = True
            self._deadlines[thread_id] = time.monotonic() + self.seconds

    def _watch(self) -> None:
        while self._enforce():
            time.sleep(POLL_INTERVAL_S)

    def _enforce(self) -> bool:
        """Interrupt the calls whose time is up; return whether any remain."""
        with self._lock:
            now = time.monotonic()
            for thread_id in [each for each, due in self._deadlines.items() if due <= now]:
                # Only once: the first exception ends a call.
                del self._deadlines[thread_id]
                _raise_in(thread_id)
            self._is_watching = bool(self._deadlines)
            return self._is_watching


def _raise_in(thread_id: int) -> None:
    """Raise a `TimeLimitError` in a thread at its next bytecode.

    Must not be revoked: CPython 3.11 would check for it forever, and hang under a tracer.
    """
    error = ctypes.py_object(TimeLimitError)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), error)


def _await_arrival() -> None:
    """Give a pending error time to arrive here, where it is expected."""
    for _ in range(ARRIVAL_STEPS):
        time.sleep(0)
