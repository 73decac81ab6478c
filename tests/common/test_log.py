"""The log: one line a record, and a log that nobody reads stops nothing."""

import logging
import os
import sys
import warnings
from pathlib import Path

import pytest

from common import log as logs
from common.log import MAX_WAITING_BYTES, LineWriter

PATIENT_S = 30.0


@pytest.fixture
def restored():
    """The loggers as they were afterwards."""
    root = logging.getLogger()
    before = root.level, root.handlers[:], sys.stderr
    levels = {name: logging.getLogger(name).level for name in logs.CHATTY_LIBRARIES}
    yield
    logging.captureWarnings(capture=False)
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    sys.stderr = before[2]
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


class Log:
    """A file that takes the whole process's log."""

    def __init__(self, path):
        self.path = path
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)

    def getvalue(self):
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logs.WriterHandler):
                assert handler.writer.drain(PATIENT_S)
        return self.path.read_text()


@pytest.fixture
def logged(restored, tmp_path):  # noqa: ARG001 (it is set up first)
    log = Log(tmp_path / "log")
    yield log
    log.getvalue()
    os.close(log.descriptor)


class Pipe:
    """A pipe that nobody reads, until somebody does."""

    def __init__(self):
        self.reader, self.writer = os.pipe()

    def read_until(self, text):
        """Read up to a text, and return the lines."""
        read = b""
        while text.encode() not in read:
            read += os.read(self.reader, 2**16)
        return read.decode().splitlines()


@pytest.fixture
def pipe():
    """Left open: a thread waits for it."""
    return Pipe()


def test_a_record_with_its_traceback_is_one_line(logged):
    logs.configure("info", logged.descriptor)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("backend.x").exception("it\nfailed")
    (line,) = logged.getvalue().splitlines()
    assert "ERROR backend.x: it\\nfailed\\nTraceback" in line
    assert line.endswith("ValueError: two\\nlines")


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("debug", ["d", "i", "w"]),
        ("trace", ["d", "i", "w"]),
        ("info", ["i", "w"]),
        ("warn", ["w"]),
    ],
)
def test_the_level_decides_what_is_shown(logged, level, shown):
    logs.configure(level, logged.descriptor)
    log = logging.getLogger("backend.x")
    log.debug("d")
    log.info("i")
    log.warning("w")
    assert [line.rpartition(": ")[2] for line in logged.getvalue().splitlines()] == shown


def test_chatty_libraries_are_quiet_even_at_debug(logged):
    logs.configure("debug", logged.descriptor)
    logging.getLogger("httpx").info("HTTP request")
    assert logged.getvalue() == ""


def test_warnings_go_to_the_log(logged):
    logs.configure("info", logged.descriptor)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=False)
        logging.captureWarnings(capture=True)
        warnings.warn("old", UserWarning, stacklevel=1)
    assert "UserWarning: old" in logged.getvalue()


def test_configuring_again_replaces_the_first_setup(logged, tmp_path):
    first = Log(tmp_path / "first")
    logs.configure("info", first.descriptor)
    logs.configure("info", logged.descriptor)
    logging.getLogger("backend.x").info("once")
    assert logged.getvalue().count("once") == 1
    assert first.getvalue() == ""


@pytest.mark.usefixtures("restored")
def test_a_log_that_nobody_reads_stops_nothing(pipe):
    logs.configure("info", pipe.writer)
    log = logging.getLogger("backend.x")
    text = "x" * 100_000
    sent = 2 * MAX_WAITING_BYTES // len(text)
    for number in range(sent):
        log.info("line %d %s", number, text)
    *lines, counted = pipe.read_until("were dropped")
    written = len(lines)
    assert [f" line {number} xxx" in line for number, line in enumerate(lines)] == [True] * written
    assert 0 < written < sent
    assert f"WARNING common.log: {sent - written} lines of the log were dropped" in counted
    log.info("again")
    assert pipe.read_until("again")[-1].endswith("INFO backend.x: again")


def test_the_count_comes_before_the_next_line(pipe):
    writer = LineWriter(pipe.writer, lambda count: f"{count} lost")
    for _ in range(3):
        writer.put("x" * (MAX_WAITING_BYTES + 1))
    writer.put("next")
    assert pipe.read_until("next") == ["3 lost", "next"]


def test_a_reader_that_has_gone_is_no_error(pipe):
    os.close(pipe.reader)
    writer = LineWriter(pipe.writer, lambda count: f"{count} lost")
    writer.put("nobody reads this")
    assert writer.drain(PATIENT_S)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_what_a_full_disk_loses_is_counted_when_there_is_room():
    """Linux has a device that is always full."""
    full = os.open("/dev/full", os.O_WRONLY)
    counts = []
    writer = LineWriter(full, lambda count: counts.append(count) or f"{count} lost")
    for _ in range(2):
        writer.put("lost")
        assert writer.drain(PATIENT_S)
    assert counts == [1]
    writer.put("lost as well")
    assert writer.drain(PATIENT_S)
    assert counts == [1, 2]
    os.close(full)


def fill(descriptor):
    while True:
        os.write(descriptor, b"z" * 100)


@pytest.mark.usefixtures("restored")
def test_printing_to_stderr_does_not_wait_for_a_reader(pipe):
    before = os.dup(logs.STDERR)
    os.dup2(pipe.writer, logs.STDERR)
    try:
        logs.configure("info")
        for _ in range(200):
            print("y" * 1000, file=sys.stderr)  # noqa: T201 (as libraries do)
        with pytest.raises(BlockingIOError):
            fill(logs.STDERR)
        print("done", file=sys.stderr)  # noqa: T201
        lines = pipe.read_until("done")
    finally:
        os.dup2(before, logs.STDERR)
        os.close(before)
    assert sum(line.endswith("y" * 1000) for line in lines) == 200


@pytest.mark.parametrize(
    ("environment", "level"),
    [
        ({}, "info"),
        ({"LOCALAI_LOG_LEVEL": "Debug"}, "debug"),
        ({"MLX_BACKEND_LOG_LEVEL": " ERROR ", "LOCALAI_LOG_LEVEL": "debug"}, "error"),
        ({"MLX_BACKEND_LOG_LEVEL": "", "LOCALAI_LOG_LEVEL": "warn"}, "warn"),
    ],
)
def test_our_variable_sets_the_level_before_the_hosts(environment, level):
    assert logs.level_of(environment) == level


@pytest.mark.parametrize("name", ["MLX_BACKEND_LOG_LEVEL", "LOCALAI_LOG_LEVEL"])
def test_a_level_that_is_none_is_refused_with_the_name_of_its_variable(name):
    with pytest.raises(ValueError, match=f"{name}: 'loud' is none of trace, debug, info"):
        logs.level_of({name: "loud"})
