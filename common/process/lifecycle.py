"""How a process spawned by a host ends: by a signal, or together with its parent."""

import asyncio
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn

EXIT_DEADLINE_S = 14.0
"""A host waits 15 s between SIGTERM and SIGKILL: unfinished work is cut off then."""

LAST_LINES_TIMEOUT_S = 2.0
"""How long a process that ends at once may still log."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_INTERVAL = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m)?")
_SECONDS_PER_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, None: 1.0}

log = logging.getLogger(__name__)


class StopRequest:
    """Turns the first of `STOP_SIGNALS` into a request to stop; SIGHUP unless `nohup` ignores it.

    A second signal ends the process at once; so does a stop that takes longer than
    `EXIT_DEADLINE_S`.
    """

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self._heard: list[signal.Signals] = []

    def listen(self) -> None:
        """Install the signal handlers; call it on the running event loop."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            # `nohup` ignores this one. Shells ignore others for whatever runs in the background.
            is_unwanted = number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
            if not is_unwanted:
                self._heard.append(number)
                loop.add_signal_handler(number, self._receive, number)

    async def wait(self) -> None:
        """Wait for the first signal."""
        await self._requested.wait()

    def _receive(self, number: signal.Signals) -> None:
        for each in self._heard:
            # The kernel handles the second signal, even if the event loop is blocked.
            signal.signal(each, signal.SIG_DFL)
        self._requested.set()
        _start_daemon("exit-deadline", _exit_after_deadline)
        log.info("%s: finishing running work, then exiting", number.name)


def exit_at_once(status: int) -> NoReturn:
    """End the process without unwinding, after a last attempt to flush its log.

    If flushing hangs, the kernel ends the process.
    """
    signal.setitimer(signal.ITIMER_REAL, LAST_LINES_TIMEOUT_S)
    logging.shutdown()
    os._exit(status)


def parse_interval(text: str) -> float:
    """Return the seconds in `500ms`, `2s`, `1m` or a bare number of seconds.

    Raises:
        ValueError: It is none of these, or not above zero.
    """
    match = _INTERVAL.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS_PER_UNIT[match[2]] if match else 0.0
    if seconds <= 0.0:
        raise ValueError(f"{text!r} is not an interval such as 500ms, 2s or 1m")
    return seconds


def exit_with_parent(interval_s: float, recorded: int | None = None) -> None:
    """End the process at once when its parent is gone; does nothing without a parent.

    A thread checks, so that a busy event loop cannot keep an orphan alive.

    Args:
        interval_s: Time between checks.
        recorded: The parent at an earlier time, if known: if it has changed, the process ends now.
    """
    parent = os.getppid() if recorded is None else recorded
    if parent <= 1:
        return
    if os.getppid() != parent:
        _exit_because("parent process %d is gone: exiting", parent)
    _start_daemon("parent-watch", lambda: _watch(parent, interval_s))


def _watch(parent: int, interval_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(interval_s)
    _exit_because("parent process %d is gone: exiting", parent)


def _exit_after_deadline() -> None:
    time.sleep(EXIT_DEADLINE_S)
    _exit_because("still running %.0f s after the signal: exiting at once", EXIT_DEADLINE_S)


def _exit_because(reason: str, *values: object) -> NoReturn:
    # Armed before logging: logging may hang, the kernel does not.
    signal.setitimer(signal.ITIMER_REAL, LAST_LINES_TIMEOUT_S)
    log.error(reason, *values)
    exit_at_once(1)


def _start_daemon(name: str, target: Callable[[], None]) -> None:
    threading.Thread(target=target, name=name, daemon=True).start()
