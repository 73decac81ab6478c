import contextlib
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from backend.model.text.hf_renderer import TimeLimit, TimeLimitError

SHORT_S = 0.15


def endless():
    while True:
        pass


def stubborn():
    while True:
        try:
            while True:
                pass
        except Exception:  # noqa: BLE001, S110 (as a template's functions might)
            pass


@pytest.mark.parametrize("work", [endless, stubborn])
def test_what_does_not_end_is_ended(work):
    with pytest.raises(TimeLimitError):
        TimeLimit(SHORT_S).run(work)


def test_what_ends_in_time_returns_or_raises_what_is_its_own():
    limit = TimeLimit(60.0)
    assert limit.run(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        limit.run(lambda: 1 / 0)


@pytest.mark.slow
def test_a_call_that_ends_as_its_time_is_up_disturbs_nothing_later():
    limit = TimeLimit(0.1)
    for microseconds in range(0, 20_000, 500):
        with contextlib.suppress(TimeLimitError):
            limit.run(partial(time.sleep, 0.09 + microseconds / 1e6))
        sum(range(1000))


def test_each_thread_has_its_own_time():
    limit = TimeLimit(SHORT_S)
    with ThreadPoolExecutor(4) as pool:
        doomed = [pool.submit(limit.run, endless) for _ in range(2)]
        fine = [pool.submit(limit.run, lambda: sum(range(1000))) for _ in range(2)]
        assert [each.result() for each in fine] == [499_500] * 2
        assert [type(each.exception()) for each in doomed] == [TimeLimitError] * 2


def test_the_watching_thread_ends_when_there_is_nothing_to_watch():
    TimeLimit(60.0).run(int)
    watchers = [thread for thread in threading.enumerate() if thread.name == "time-limit"]
    for watcher in watchers:
        watcher.join(5.0)
        assert not watcher.is_alive()


TRACED = """
import sys
from backend.model.text.hf_renderer import TimeLimit, TimeLimitError
try:
    TimeLimit(0.1).run(lambda: [None for _ in iter(int, 1)])
except TimeLimitError:
    TimeLimit(60.0).run(int)
def called():
    return 7
sys.settrace(lambda *_: None)
print(called())
"""


def test_the_interpreter_is_left_as_it_was():
    """An error that is taken back makes CPython 3.11 hang in the next function that is traced."""
    command = [sys.executable, "-c", TRACED]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout == "7\n"
