"""The child's side of a `HelperProcess`: it serves one job after another within its limits."""

import contextlib
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterable

from common.helper import LENGTH
from common.process import STOP_SIGNALS


def serve(
    descriptor: int, answers: Callable[[bytes], Iterable[bytes]], *, idle_s: float | None = None
) -> None:
    """Answer jobs until the other end of the socket is closed, then end this process.

    Args:
        descriptor: The socket, which is inherited.
        answers: Returns the answers to a job.
        idle_s: How long to wait for a job, if not for ever.
    """
    # The parent handles signals to the process group: it closes the socket when it ends.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    # The parent may have gone, even while this process was starting.
    is_over = contextlib.suppress(TimeoutError, ConnectionError)
    with connection, connection.makefile("rb") as reader, is_over:
        _send(connection, b"")
        connection.settimeout(idle_s)
        while head := reader.read(LENGTH.size):
            (length,) = LENGTH.unpack(head)
            for answer in answers(reader.read(length)):
                _send(connection, answer)
    # At once: nothing here needs to be finished, and unloading the libraries takes a while.
    os._exit(0)


def limit_memory(margin_bytes: int) -> None:
    """Limit the address space to its present size and a margin; macOS has no such limit."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123
            pages = int(statm.read().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + margin_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def limit_time(seconds: int) -> None:
    """Limit the processor time from now on; the kernel ends a process that takes more."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(usage.ru_utime + usage.ru_stime) + seconds
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


def _send(connection: socket.socket, answer: bytes) -> None:
    connection.sendall(LENGTH.pack(len(answer)))
    connection.sendall(answer)
