"""Checks of the machine: MLX and its device, the BLAS, the memory."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rich.filesize import decimal

from backend.cli.doctor.finding import Finding, Verdict, bad, good, warning
from backend.cli.serve import server_environment
from common.memory.machine import machine_bytes
from common.openblas import INSTALL_HINT, SWITCH, find_openblas, is_wanted
from common.remedies import mlx_command

PROBE_TIMEOUT_S = 60.0
SMALL_MEMORY = 8 * 2**30


def check_device(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Let MLX compute, as a server would."""
    try:
        probe = _probe(environment)
    except _ProbeError as error:
        yield bad("mlx", str(error), mlx_command())
        return
    name = f"{probe['device']} {probe['name']}".strip()
    yield good("mlx", f"computes on the {name}, {probe['gflops']:,.0f} GFLOP/s in float32")
    if working_set := probe["working_set"]:
        yield _wired_limit(probe["memory"], working_set)


def check_blas(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Look for a fast BLAS, if MLX computes on a CPU on Linux."""
    if environment.get(SWITCH) == "0":
        yield warning("blas", f"{SWITCH}=0: MLX's slow reference BLAS is used", f"unset {SWITCH}")
    elif is_wanted(environment):
        library = find_openblas()
        if library is None:
            text = "no OpenBLAS: MLX's reference BLAS is many times slower"
            yield warning("blas", text, INSTALL_HINT)
        else:
            yield good("blas", f"{library} is preloaded by run.sh and serve")


def check_memory() -> Iterator[Finding]:
    """Report the memory that this process may use, with the limits of control groups."""
    size = machine_bytes()
    text = f"{decimal(size)} for this process"
    if size < SMALL_MEMORY:
        remedy = "raise the container's memory limit, or choose a small model: fit MODEL"
        yield warning("memory", text, remedy)
    else:
        yield good("memory", text)


class _ProbeError(Exception):
    """MLX did not compute."""


def _probe(environment: Mapping[str, str]) -> dict[str, Any]:
    library = find_openblas() if is_wanted(environment) else None
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "backend.model.machine_probe"],
            env=server_environment(environment, library),
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _ProbeError(f"did not compute a product within {PROBE_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"ended with code {done.returncode}"]
        raise _ProbeError(last[0])
    probe: dict[str, Any] = json.loads(done.stdout)
    return probe


def _wired_limit(memory: int, working_set: int) -> Finding:
    """Report how much of a Mac's memory its GPU may use: 65 to 75 percent unless it is set."""
    text = f"the GPU may keep {decimal(working_set)} of {decimal(memory)}"
    if working_set >= 0.8 * memory:
        return good("wired limit", text)
    megabytes = int(0.85 * memory / 2**20)
    remedy = f"for larger models: sudo sysctl iogpu.wired_limit_mb={megabytes}"
    return Finding(Verdict.GOOD, "wired limit", text, remedy)
