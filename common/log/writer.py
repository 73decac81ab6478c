"""Writes lines to a descriptor that may stop accepting them, without blocking callers."""

import os
import select
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable

MAX_WAITING_BYTES = 8 * 2**20


class LineWriter:
    """A bounded queue of lines; a line that does not fit is dropped and counted.

    The next line written reports the count.
    """

    def __init__(self, descriptor: int, count_line: Callable[[int], str]) -> None:
        """Start the thread.

        Args:
            descriptor: The descriptor to write to. A pipe or a socket is made non-blocking,
                because C code writes to it as well.
            count_line: Formats the line that reports a number of dropped lines.
        """
        refuse_instead_of_waiting(descriptor)
        self._descriptor = descriptor
        self._count_line = count_line
        # Each with the number of lines lost if it is dropped: a count stands for all it reports.
        self._lines: deque[tuple[bytes, int]] = deque()
        self._waiting_bytes = 0
        self._dropped = 0
        # Reentrant: the garbage collector may run here, and finalizers may log.
        self._changed = threading.Condition(threading.RLock())
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def put(self, line: str) -> None:
        """Queue a line."""
        data = _encoded(line)
        with self._changed:
            if self._waiting_bytes + len(data) > MAX_WAITING_BYTES:
                self._dropped += 1
            else:
                self._append_count()
                self._append(data, 1)

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is written or dropped; false after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting_bytes, timeout_s)

    def _append_count(self) -> None:
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            self._append(_encoded(self._count_line(dropped)), dropped)

    def _append(self, data: bytes, lines: int) -> None:
        self._lines.append((data, lines))
        self._waiting_bytes += len(data)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                data, lines = self._lines.popleft()
            is_written = self._write(data)
            with self._changed:
                self._waiting_bytes -= len(data)
                if not is_written:
                    self._dropped += lines
                elif not self._lines:
                    self._append_count()
                self._changed.notify_all()

    def _write(self, data: bytes) -> bool:
        """Write a line; false if the reader is gone or the disk is full."""
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:
                _wait_until_writable(self._descriptor)
            except OSError:
                return False
        return True


def refuse_instead_of_waiting(descriptor: int) -> None:
    """Make a pipe or a socket non-blocking, for this process alone where possible.

    The flag belongs to the open file, which others may share; on Linux a pipe is reopened.
    """
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(kind) and sys.platform == "linux":
        try:
            own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return
        os.dup2(own, descriptor)
        os.close(own)
    elif stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind):
        os.set_blocking(descriptor, False)


def _wait_until_writable(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    poll.poll()


def _encoded(line: str) -> bytes:
    return line.encode("utf-8", "backslashreplace") + b"\n"
