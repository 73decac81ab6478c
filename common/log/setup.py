"""Logging of the process: one line per record, to stderr, without ever blocking."""

import io
import logging
import os
import sys
import threading
from collections.abc import Mapping
from typing import TextIO, cast

from common.log.writer import LineWriter

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
        """Start the thread.

        Args:
            descriptor: The descriptor to write to.
        """
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
        """Start without text.

        Args:
            writer: Takes the lines.
        """
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
