"""Children that are stopped before they run, and parents that die."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from groups import is_alive
from waiting import wait_until

from common.process import tied

TIMEOUT_S = 30.0
# Stops its child as soon as there is one, long before that could ask for anything.
PARENT = """
import os, signal, sys
from backend.engine import processes
start = processes.subprocess.Popen

class Stopped(start):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        os.kill(self.pid, signal.SIGSTOP)

processes.subprocess.Popen = Stopped
child = processes.start_follower(1, "127.0.0.1:1")
print(child.pid, flush=True)
sys.stdin.readline()
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS has no such signal")


def wait_until_gone(process_id):
    wait_until(lambda: not is_alive(process_id))


def sleeper(descriptors):
    code = "import time; print('runs', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, pass_fds=descriptors, stdout=subprocess.PIPE)


def test_an_engine_process_that_was_stopped_as_it_began_ends_with_its_parent():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    with parent:
        child = int(parent.stdout.readline())
        try:
            assert is_alive(child)
            parent.kill()
            wait_until_gone(child)
        finally:
            if is_alive(child):
                os.kill(child, signal.SIGKILL)


def test_a_child_runs_as_long_as_its_parent_wants_it():
    process = tied(sleeper)
    with process:
        assert process.stdout.readline() == b"runs\n"
        assert process.poll() is None
        process.terminate()
        assert process.wait(TIMEOUT_S) == -signal.SIGTERM


def test_no_descriptor_is_left_of_children_that_have_ended_or_never_began():
    def refuse(_descriptors):
        raise OSError("no more processes")

    def count():
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    before = count()
    for _ in range(3):
        with tied(sleeper) as process:
            process.kill()
        del process
        with pytest.raises(OSError, match="no more processes"):
            tied(refuse)
    assert count() == before
