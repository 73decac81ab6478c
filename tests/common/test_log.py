import io
import logging
import warnings

import pytest

from common import log as logs


@pytest.fixture
def logged():
    """A stream that takes the whole process's log, and the loggers as they were afterwards."""
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    levels = {name: logging.getLogger(name).level for name in logs.CHATTY_LIBRARIES}
    stream = io.StringIO()
    yield stream
    logging.captureWarnings(capture=False)
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_a_record_with_its_traceback_is_one_line(logged):
    logs.configure("info", logged)
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
        ("INFO", ["i", "w"]),
        ("warn", ["w"]),
        ("loud", ["i", "w"]),
    ],
)
def test_the_level_decides_what_is_shown(logged, level, shown):
    logs.configure(level, logged)
    log = logging.getLogger("backend.x")
    log.debug("d")
    log.info("i")
    log.warning("w")
    assert [line.rpartition(": ")[2] for line in logged.getvalue().splitlines()] == shown


def test_chatty_libraries_are_quiet_even_at_debug(logged):
    logs.configure("debug", logged)
    logging.getLogger("httpx").info("HTTP request")
    assert logged.getvalue() == ""


def test_warnings_go_to_the_log(logged):
    logs.configure("info", logged)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=False)
        logging.captureWarnings(capture=True)
        warnings.warn("old", UserWarning, stacklevel=1)
    assert "UserWarning: old" in logged.getvalue()


def test_configuring_again_replaces_the_first_setup(logged):
    first = io.StringIO()
    logs.configure("info", first)
    logs.configure("info", logged)
    logging.getLogger("backend.x").info("once")
    assert first.getvalue() == ""
    assert logged.getvalue().count("once") == 1
