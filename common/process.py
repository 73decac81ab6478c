"""This process: its cores, its environment, its parent, and threads of its own."""

import asyncio
import fcntl
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn, ParamSpec, TypeAlias, TypeVar

from common.machine_memory import ControlGroup, control_groups

log = logging.getLogger(__name__)


def usable_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process can keep busy, at least one.

    These are the cores that it may run on, or fewer if a control group limits its time on them.

    Args:
        root: Directory that contains `proc` and the mount points.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    groups = control_groups("cpu", root)
    shares = (share for group in groups for share in _shares(group))
    return max(1, int(min([allowed or 1, *shares])))


def _shares(group: ControlGroup) -> Iterator[float]:
    """Yield the limit of a group in cores, if it has one."""
    if group.version == 2:
        words = [word for line in group.lines("cpu.max") for word in line.split()]
    else:
        words = [*group.lines("cpu.cfs_quota_us"), *group.lines("cpu.cfs_period_us")]
    # Without a limit the first word is `max` or -1.
    if len(words) == 2 and all(map(str.isdecimal, words)) and int(words[1]) > 0:
        yield int(words[0]) / int(words[1])


_SECRET_NAME = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|(API|ACCESS|PRIVATE)_?KEY"
    r"|(^|_)AUTH(_|$)|((^|_)(KEY|PAT|JWT|DSN)|_PASS|\wPWD)\d*$",
    re.IGNORECASE,
)
# `scheme://user:password@host`; a proxy of a download may need its own.
_LOGIN = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
_PROXY = re.compile(r"PROXY$", re.IGNORECASE)
# They steer a server, or describe the relation of a process to its starter.
_OWN_NAME = re.compile(
    r"(LISTEN_|WATCHDOG_|OTEL_|GRPC_|LOCALAI_(?!LOG_LEVEL))"
    r"|(NOTIFY_SOCKET|INVOCATION_ID|JOURNAL_STREAM|MAINPID|MLX_BACKEND_PARENT)$"
    r"|PYTHON(STARTUP|INSPECT|BREAKPOINT)$"
)


def _is_secret(name: str, value: str) -> bool:
    """Tell whether a variable is a secret by its name, or holds a login; PWDs are directories."""
    is_login = _LOGIN.search(value) and not _PROXY.search(name)
    return bool(is_login or (_SECRET_NAME.search(name) and name != "OLDPWD"))


def withhold_secrets(environment: MutableMapping[str, str]) -> Mapping[str, str]:
    """Remove the variables that are secrets, and return them.

    Processes that this one starts afterwards inherit none of them.
    """
    names = [name for name, value in environment.items() if _is_secret(name, value)]
    return {name: environment.pop(name) for name in names}


def for_children(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables that are meant for child processes as well."""
    return {
        name: value
        for name, value in environment.items()
        if not (_is_secret(name, value) or _OWN_NAME.match(name))
    }


_STANDARD_ERROR = 2


def keep_standard_descriptors() -> None:
    """Open the null device for standard input, output and errors, where they are closed.

    A socket would take the number, and get the output of libraries.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        os.set_inheritable(descriptor, True)  # noqa: FBT003 (its own form)
    os.close(descriptor)


EXIT_DEADLINE_S = 14.0
"""A host waits 15 s between SIGTERM and SIGKILL: unfinished work is cut off then."""

TWIN_SIGNAL_S = 0.5

LAST_LINES_TIMEOUT_S = 2.0
"""How long a process that ends at once may still log."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_last_acts: list[Callable[[], None]] = []


def before_abrupt_end(act: Callable[[], None]) -> None:
    """Have an action run, which must not wait, before this process ends without unwinding."""
    _last_acts.append(act)


def _act_last() -> None:
    while _last_acts:
        with suppress(OSError):
            _last_acts.pop()()


_INTERVAL = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m)?")
_SECONDS_PER_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, None: 1.0}


class StopRequest:
    """Turns the first of `STOP_SIGNALS` into a request to stop; SIGHUP unless `nohup` ignores it.

    A later signal ends the process at once; so does a stop that takes longer than
    `EXIT_DEADLINE_S`.
    """

    def __init__(self, twin_s: float = TWIN_SIGNAL_S) -> None:
        """Create it on the running event loop.

        Args:
            twin_s: Signals within this time are one: a wrapper passes on the one that a terminal
                or a service manager has sent to the whole group.
        """
        self._requested = asyncio.Event()
        self._heard: list[signal.Signals] = []
        self._twin_s = twin_s
        self._armed_at = 0.0

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
        if self._requested.is_set():
            return
        self._armed_at = time.monotonic() + self._twin_s
        for each in self._heard:
            # Runs although the event loop may be blocked.
            signal.signal(each, self._receive_again)
        asyncio.get_running_loop().call_later(self._twin_s, self._leave_to_kernel)
        self._requested.set()
        _start_daemon("exit-deadline", _exit_after_deadline)
        log.info("%s: finishing running work, then exiting", number.name)

    def _receive_again(self, number: int, _frame: object) -> None:
        if time.monotonic() >= self._armed_at:
            _act_last()
            self._leave_to_kernel()
            os.kill(os.getpid(), number)

    def _leave_to_kernel(self) -> None:
        # With something left to do, the handler does it.
        if not _last_acts:
            for each in self._heard:
                signal.signal(each, signal.SIG_DFL)


def exit_at_once(status: int) -> NoReturn:
    """End the process without unwinding, after a last attempt to flush its log.

    If flushing hangs, the kernel ends the process.
    """
    signal.setitimer(signal.ITIMER_REAL, LAST_LINES_TIMEOUT_S)
    _act_last()
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


Process: TypeAlias = subprocess.Popen[bytes]


def tied(start: Callable[[list[int]], Process]) -> Process:
    """Start a child that ends with this process, or when its `Popen` is garbage-collected.

    Where the kernel lacks this (macOS), the child has to watch its parent itself.

    Args:
        start: Starts the child, which inherits these descriptors but need not use them.
    """
    if sys.platform != "linux":
        return start([])
    theirs, ours = os.pipe()
    with ExitStack() as cleanup:
        cleanup.callback(os.close, theirs)
        with ExitStack() as unless_started:
            unless_started.callback(os.close, ours)
            process = start([theirs])
            unless_started.pop_all()
        weakref.finalize(process, os.close, ours)
        fcntl.fcntl(theirs, fcntl.F_SETOWN, process.pid)
        fcntl.fcntl(theirs, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(theirs, fcntl.F_SETFL, os.O_ASYNC)
    return process


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_starter = ThreadPoolExecutor(1, "starter")


async def in_own_thread(
    function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Run a function on a thread of its own and return its result; cancelling abandons it.

    In a pool, hanging threads would take room from other work and delay the end of the process.
    """
    outcome: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
    work = partial(_work, outcome, partial(function, *args, **kwargs))
    thread = threading.Thread(target=work, name=function.__name__, daemon=True)
    # A start waits until the thread runs: on a busy machine that would hold up the event loop.
    await outcome.get_loop().run_in_executor(_starter, thread.start)
    return await outcome


def _work(outcome: "asyncio.Future[Result]", function: Callable[[], Result]) -> None:
    settle: Callable[[], None]
    try:
        settle = partial(outcome.set_result, function())
    except BaseException as error:  # noqa: BLE001 (handed to the waiting task)
        settle = partial(outcome.set_exception, error)
    # The loop may have ended meanwhile.
    with suppress(RuntimeError):
        outcome.get_loop().call_soon_threadsafe(_settle, outcome, settle)


def _settle(outcome: "asyncio.Future[Result]", settle: Callable[[], None]) -> None:
    if not outcome.cancelled():
        settle()
