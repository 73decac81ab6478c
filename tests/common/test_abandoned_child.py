"""A helper's process whose parent has gone ends without a word."""

import socket
import subprocess
import sys

import pytest

from common.helper import LENGTH

SERVING = "import sys; from common.child import serve; serve(int(sys.argv[1]), lambda job: [job])"


def end_of(child_end: socket.socket) -> "subprocess.CompletedProcess[str]":
    descriptor = child_end.fileno()
    return subprocess.run(
        [sys.executable, "-c", SERVING, str(descriptor)],
        pass_fds=[descriptor],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("sent", [b"", LENGTH.pack(1), LENGTH.pack(1) + b"x"])
def test_a_child_whose_parent_has_gone_ends_quietly(sent):
    parent, child = socket.socketpair()
    with child:
        with parent:
            parent.sendall(sent)
        ended = end_of(child)
    assert (ended.returncode, ended.stderr) == (0, "")
