"""The log: short messages, written by a thread of their own, and those that are said once."""

import io
import logging
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO, cast

MAX_MESSAGE_BYTES = 2048
"""Trailers may take 8 KiB, and a byte outside printable ASCII takes three."""


def shortened(message: str) -> str:
    """Return a message shortened to at most `MAX_MESSAGE_BYTES` of valid UTF-8."""
    data = message.encode("utf-8", "backslashreplace")
    if len(data) <= MAX_MESSAGE_BYTES:
        return data.decode()
    # The inserted number is never longer than that of all bytes.
    kept = MAX_MESSAGE_BYTES - len(_gap(len(data)))
    head, tail = data[: kept // 2], data[len(data) - kept // 2 :]
    gap = _gap(len(data) - len(head) - len(tail))
    return head.decode(errors="ignore") + gap + tail.decode(errors="ignore")


def _gap(left_out: int) -> str:
    return f" [... {left_out} bytes left out ...] "


class Seldom:
    """Lets one event per interval through; belongs to one thread."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._due_at = float("-inf")

    def is_due(self) -> bool:
        """Tell whether to let this event through."""
        now = time.monotonic()
        if now < self._due_at:
            return False
        self._due_at = now + self._interval_s
        return True


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


LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

# The first one that is set wins.
LEVEL_VARIABLES = ("MLX_BACKEND_LOG_LEVEL", "LOCALAI_LOG_LEVEL")

STDERR = 2
MAX_LINE_CHARS = 2**16
# How long an ending process waits for a reader of its last lines.
FLUSH_TIMEOUT_S = 1.0

CHATTY_LIBRARIES = (
    "asyncio",
    "filelock",
    "fsspec",
    "grpc",
    "httpcore",
    "httpx",
    "huggingface_hub",
    "transformers",
    "urllib3",
)


class OneLineFormatter(logging.Formatter):
    """Keeps a record with its traceback on one line: hosts read logs line by line."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Format a record, with line breaks escaped."""
        return "\\n".join(super().format(record).splitlines())


class WriterHandler(logging.Handler):
    """Formats records on the calling thread and writes them on another."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.setFormatter(OneLineFormatter())
        self.writer = LineWriter(descriptor, self._count_line)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record, or count it as dropped if the queue is full."""
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 (as the handlers of the standard library do)
            self.handleError(record)
        else:
            self.writer.put(line)

    def flush(self) -> None:
        """Wait for the writing thread, but only briefly for a missing reader."""
        self.writer.drain(FLUSH_TIMEOUT_S)

    def _count_line(self, dropped: int) -> str:
        text = "%d lines of the log were dropped: they could not be written in time"
        values = (__name__, logging.WARNING, __file__, 0, text, (dropped,), None)
        return self.format(logging.LogRecord(*values))


class LineStream(io.TextIOBase):
    """Replaces `sys.stderr`: whole lines go through the log's queue, so printing never blocks."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer
        self._begun = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        """Queue the complete lines of a text; the rest waits for its line break."""
        with self._lock:
            *lines, begun = (self._begun + text).replace("\r", "\n").split("\n")
            if len(begun) > MAX_LINE_CHARS:
                lines.append(begun)
                begun = ""
            self._begun = begun
        for line in filter(None, lines):
            self._writer.put(line)
        return len(text)

    def writable(self) -> bool:
        """Return true."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of stderr, for child processes to inherit."""
        return STDERR


def level_of(environment: Mapping[str, str], default: str = "info") -> str:
    """Return the level set by the environment.

    Raises:
        ValueError: It is none of `LEVELS`; the message names the variable.
    """
    name = next(filter(environment.get, LEVEL_VARIABLES), None)
    if name is None:
        return default
    level = environment[name].strip().lower()
    if level not in LEVELS:
        raise ValueError(f"{name}: {environment[name]!r} is none of {', '.join(LEVELS)}")
    return level


def configure_as_named(environment: Mapping[str, str]) -> bool:
    """Configure by the environment; if it names no level, log that and return false."""
    try:
        configure(level_of(environment))
    except ValueError as error:
        configure("info")
        logging.getLogger(__name__).critical("%s", error)
        return False
    return True


def configure(level: str, descriptor: int | None = None) -> None:
    """Send all records and Python's warnings to one descriptor; replaces an earlier setup.

    Args:
        level: A name of `LEVELS`.
        descriptor: `None` means stderr, and redirects `sys.stderr` as well.
    """
    handler = WriterHandler(_stderr() if descriptor is None else descriptor)
    if descriptor is None:
        sys.stderr = cast("TextIO", LineStream(handler.writer))
    logging.basicConfig(level=LEVELS[level], handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    for name in CHATTY_LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)


def _stderr() -> int:
    """Return the descriptor of stderr; if it is closed, its number may belong to another file."""
    return STDERR if sys.__stderr__ is not None else os.open(os.devnull, os.O_WRONLY)
