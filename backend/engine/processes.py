"""Processes that never outlive who started them."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.lifeline import Process, tied

_PR_SET_PDEATHSIG = 1
# It has another working directory, where Python would look for this package.
_PLACE = str(Path(__file__).parents[2])
_BOOT = (
    "import runpy, sys; sys.path[0] = sys.argv.pop(1); "
    "runpy.run_module('backend.rank', run_name='__main__', alter_sys=True)"
)
# Libraries that print must not reach what reads the output of the server.
_STDERR = 2
_KNOWN_NAME = re.compile(
    r"(PATH|HOME|USER|LOGNAME|SHELL|LANG|TZ|TMPDIR|TEMP|TMP|VIRTUAL_ENV|CC|CXX)$"
    r"|(LC|LD|DYLD|PYTHON|XDG|HF|HUGGINGFACE|TRANSFORMERS|TOKENIZERS|COVERAGE)_|PYTHON"
    r"|(MLX|METAL|MTL|CUDA|CUBLAS|CUDNN|NVIDIA|NCCL|OMP|OPENBLAS|MKL|BLIS|VECLIB|ACCELERATE)_"
    r"|LOCALAI_LOG_LEVEL$"
)
_SECRET_NAME = re.compile(r"TOKEN$|TOKEN_|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|AUTH")
_OOM_STEP = 200
_OOM_WORST = 1000


def start_engine(server_fd: int, environment: Mapping[str, str] | None) -> Process:
    """Start the engine process, with a process group of its own, which waits for a model.

    Args:
        server_fd: The connection to this process, which is all that it inherits but stderr, and
            a pipe that ends with this process.
        environment: Its own; `None` is that of this process.
    """
    arguments = ["--server-fd", str(server_fd)]
    return _start(arguments, inherited=[server_fd], environment=environment)


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
    arguments: Sequence[str],
    *,
    inherited: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> Process:
    """Start `python -m backend.rank`, which dies with the thread that calls this.

    Until it has seen to that itself, it dies with this process.
    """
    command = [sys.executable, "-c", _BOOT, _PLACE, "--parent", str(os.getpid()), *arguments]
    return tied(
        lambda descriptors: subprocess.Popen(  # noqa: S603 (our own module, arguments of ours)
            command,
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,
            pass_fds=[*inherited, *descriptors],
            start_new_session=bool(inherited),
            cwd="/",
            env=environment,
        )
    )


def engine_environment(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return what of an environment a process that computes is to know: no secrets among it."""
    return {
        name: value
        for name, value in environment.items()
        if _KNOWN_NAME.match(name) and not _SECRET_NAME.search(name)
    }


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent has gone, or end it now if it has.

    Where the kernel does not offer it (macOS), the end of a connection does the same.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def kill_tree(leader: Process) -> None:
    """Have the kernel end a process and all that it started; one that has ended is left alone."""
    # Not reaped yet, so the number still is the leader's.
    if leader.poll() is None:
        # macOS refuses a group of which only ended processes are left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader.pid, signal.SIGKILL)


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


def die_first() -> None:
    """Have the kernel, when memory runs out, end this process before the one that started it."""
    place = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        place.write_text(str(min(int(place.read_text()) + _OOM_STEP, _OOM_WORST)))
