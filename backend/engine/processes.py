"""Processes that never outlive their starter."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.process import Process, tied

_PR_SET_PDEATHSIG = 1
# It has another working directory, so Python would not find this package.
_PLACE = str(Path(__file__).parents[2])
BOOT = (
    "import runpy, sys; sys.path[0] = sys.argv.pop(1); "
    "runpy.run_module('backend.rank', run_name='__main__', alter_sys=True)"
)
# Output of libraries must not reach the reader of the server's output.
_STDERR = 2
_OOM_STEP = 200
_OOM_WORST = 1000


def start_engine(server_fd: int, environment: Mapping[str, str] | None) -> Process:
    """Start the engine process in its own process group; it waits for a model.

    Args:
        server_fd: The connection to this process. It inherits only this, stderr, and a pipe
            that closes with this process.
        environment: Its own; `None` is this process's.
    """
    arguments = ["--server-fd", str(server_fd)]
    return start_process(arguments, inherited=[server_fd], environment=environment)


def start_follower(rank: int, control: str, *, size: int = 0, device: int = 0) -> Process:
    """Start another rank, in the process group of this one.

    Args:
        control: Address and port of rank 0.
        size: Of the group; 0 if rank 0 will tell.
        device: The index of its GPU, if there are several.
    """
    numbers = ["--rank", str(rank), "--size", str(size), "--device", str(device)]
    return start_process([*numbers, "--control", control])


def start_process(
    arguments: Sequence[str],
    *,
    inherited: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> Process:
    """Start `python -m backend.rank`, which dies with the calling thread.

    Until it has arranged that itself, it dies with this process.
    """
    command = [sys.executable, "-c", BOOT, _PLACE, "--parent", str(os.getpid()), *arguments]
    return tied(
        lambda descriptors: subprocess.Popen(  # noqa: S603 (our own module, arguments of ours)
            command,
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,
            pass_fds=[*inherited, *descriptors],
            # Not a session: Linux divides the cores among sessions, whatever is nice in each.
            process_group=0 if inherited else None,
            cwd="/",
            env=environment,
        )
    )


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process with its parent, or end it now if the parent is gone.

    Without kernel support (macOS), the end of a connection does the same.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def kill_tree(leader: Process) -> None:
    """Kill a process and its descendants; one that has ended is left alone."""
    # Not reaped yet, so the id is still the leader's.
    if leader.poll() is None:
        # macOS refuses a group with only ended processes.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader.pid, signal.SIGKILL)


def ending(process: Process | None, *, timeout_s: float = 1.0) -> str:
    """Describe how a process has ended; a remote one is simply gone."""
    if process is None:
        return "has gone"
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return "has hung up"
    if code == -signal.SIGALRM:
        return "could not link to the others in time: has one ended, or is a port closed?"
    if code < 0:
        named = {each.value: each.name for each in signal.Signals}
        return f"was ended by {named.get(-code, f'signal {-code}')}"
    return f"has ended with exit code {code}"


def die_first() -> None:
    """Have the kernel end this process before its starter when memory runs out."""
    place = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        place.write_text(str(min(int(place.read_text()) + _OOM_STEP, _OOM_WORST)))
