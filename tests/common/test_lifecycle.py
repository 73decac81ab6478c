import signal
import subprocess
import sys

import pytest

from common.process import STOP_SIGNALS, parse_interval


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("2s", 2.0), ("1m", 60.0), ("3", 3.0), (" 1.5s ", 1.5), ("0.25", 0.25)],
)
def test_an_interval_has_a_unit_or_is_seconds(text, seconds):
    assert parse_interval(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "fast", "0s", "-1s", "1h", "1 s", "nan", "inf"])
def test_what_is_no_interval_is_refused(text):
    with pytest.raises(ValueError, match="is not an interval"):
        parse_interval(text)


STOPPABLE = """
import asyncio
from common.process import StopRequest

async def main():
    stop_request = StopRequest({twin_s})
    stop_request.listen()
    print("ready", flush=True)
    await stop_request.wait()
    print("stopping", flush=True)
    {after}

asyncio.run(main())
"""


def start(after="pass", before="", twin_s=60):
    code = before + STOPPABLE.format(after=after, twin_s=twin_s)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_lets_the_process_finish(number):
    # Whatever runs these tests may ignore signals.
    heard = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    with start(before=heard) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == "stopping\n"
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    "after",
    ["import threading; threading.Event().wait()", "await asyncio.Event().wait()"],
    ids=["a blocked loop", "a loop that waits"],
)
def test_a_later_second_signal_ends_the_process(after):
    with start(after=after, twin_s=0) as process:
        process.stdout.readline()
        process.terminate()
        assert process.stdout.readline() == "stopping\n"
        process.terminate()
        assert process.wait(30) < 0


BOUND = """
import os, socket, sys
from common.address import removal
from common.process import before_abrupt_end
sock = socket.socket(socket.AF_UNIX)
sock.bind({path!r})
before_abrupt_end(removal("unix:" + {path!r}))
"""


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_later_signal_removes_the_own_socket_and_no_other(tmp_path, is_replaced):
    path = tmp_path / "x.sock"
    waiting = "await asyncio.Event().wait()"
    with start(after=waiting, before=BOUND.format(path=str(path)), twin_s=0) as process:
        process.stdout.readline()
        if is_replaced:
            path.unlink()
            path.touch()
        process.terminate()
        assert process.stdout.readline() == "stopping\n"
        process.terminate()
        assert process.wait(30) == -signal.SIGTERM
    assert path.exists() == is_replaced


def test_signals_at_once_are_one():
    after = "await asyncio.to_thread(input); print('done', flush=True)"
    with start(after=after) as process:
        process.stdout.readline()
        process.terminate()
        process.terminate()
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGINT)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"
        assert process.wait(30) == 0


def test_a_hangup_stays_ignored_under_nohup():
    with start(before="import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n") as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        process.terminate()
        assert process.stdout.readline() == "stopping\n"
        assert process.wait(30) == 0


def test_an_interrupt_is_heard_although_a_shell_ignores_it_for_the_background():
    with start(before="import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n") as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "stopping\n"
        assert process.wait(30) == 0


ORPHAN = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", '''
import sys, threading
from common.process import exit_with_parent
exit_with_parent(0.02)
print("watching", flush=True)
threading.Event().wait()
'''])
sys.stdin.readline()
"""


def test_an_orphan_ends_at_once():
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout.readline() == "watching\n"
        parent.kill()
        # The child holds the pipe's other end: it closes when the child is gone.
        assert parent.stdout.read() == ""
