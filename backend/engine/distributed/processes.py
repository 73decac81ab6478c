"""Processes that never outlive who started them."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import TypeAlias

from backend.engine.distributed.topology import Topology

Process: TypeAlias = subprocess.Popen[bytes]

_PR_SET_PDEATHSIG = 1
_MODULE = "backend.worker"
REAP_TIMEOUT_S = 5.0


def start_leader(topology: Topology, server_fd: int) -> Process:
    """Start rank 0 with a process group of its own; it starts the other ranks of this machine.

    Args:
        topology: Of the group.
        server_fd: The connection to this process, which rank 0 inherits.
    """
    local = [rank for rank, host in enumerate(topology.hosts) if host.is_local]
    arguments = ["--server-fd", str(server_fd), "--control", str(topology.control)]
    return _start([*arguments, "--local", *map(str, local)], inherited=[server_fd], leads=True)


def start_follower(rank: int, control: str, *, size: int = 0, device: int = 0) -> Process:
    """Start another rank, in the process group of this one.

    Args:
        rank: Which one.
        control: Address and port of rank 0.
        size: Of the group; 0 when rank 0 is going to tell.
        device: Which of the machine's GPUs is its own, where there are several.
    """
    numbers = ["--rank", str(rank), "--size", str(size), "--device", str(device)]
    return _start([*numbers, "--control", control])


def _start(
    arguments: Sequence[str], *, inherited: Sequence[int] = (), leads: bool = False
) -> Process:
    """Start `python -m backend.worker`, which dies with the thread that calls this."""
    return subprocess.Popen(  # noqa: S603 (our own module, arguments of ours)
        [sys.executable, "-m", _MODULE, "--parent", str(os.getpid()), *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=inherited,
        start_new_session=leads,
    )


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent has gone, or end it now if it has.

    Where the kernel does not offer it (macOS), the end of a connection does the same.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def kill_group(leader: Process) -> None:
    """End a process and all that it started, and wait for it."""
    # Not reaped yet, so the number still is the leader's.
    if leader.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        leader.wait(REAP_TIMEOUT_S)


def ending(process: Process | None, *, timeout_s: float = 1.0) -> str:
    """Say how a process has ended; one of another machine has just gone."""
    if process is None:
        return "has gone"
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return "has hung up"
    if code == -signal.SIGALRM:
        return "could not link to the others in time: can the ports of the ring be reached?"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"has ended with exit code {code}"
