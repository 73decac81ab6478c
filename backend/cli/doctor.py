"""The checks of this machine, each with its findings, and the versions in use."""

import asyncio
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import grpc
from packaging.requirements import Requirement
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from backend.cli.client import DEFAULT_ADDRESS, BackendClient, CallError
from backend.cli.render import ERROR_STYLE, QUIET_STYLE, printable
from backend.cli.serve import server_environment
from backend.cli.status import inspect
from backend.errors import BackendError
from backend.rpc.parsing.load_options import tuning_options
from common.address import AddressError, probe_port, probe_socket, socket_path, split_address
from common.machine_memory import machine_bytes
from common.openblas import INSTALL_HINT, SWITCH, find_openblas, is_wanted
from common.remedies import (
    CHECKOUT,
    DISTRIBUTION,
    install_command,
    mlx_command,
    version_of,
    vision_command,
)


class Verdict(StrEnum):
    """The result of a check."""

    GOOD = "ok"
    # The backend works, but slower or with something missing.
    WARNING = "warning"
    # The backend does not work.
    BAD = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        remedy: A command, or a step, that fixes it; empty if nothing is wrong.
    """

    verdict: Verdict
    subject: str
    text: str
    remedy: str = ""


good = partial(Finding, Verdict.GOOD)
warning = partial(Finding, Verdict.WARNING)
bad = partial(Finding, Verdict.BAD)

OLDEST_PYTHON = (3, 11)

# A module that only this extra brings, and the feature that needs it.
EXTRAS = {
    "media": ("PIL", "pictures and sounds"),
    "video": ("av", "MP4 and WebM videos; animated pictures work without"),
    "metrics": ("prometheus_client", "--metrics-addr"),
    "tracing": ("opentelemetry.sdk", "traces to OpenTelemetry"),
}
MISSING_EXTRA = "not installed: no {}"


def check_python() -> Iterator[Finding]:
    """Check the interpreter's version."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= OLDEST_PYTHON:
        yield good("python", version)
    else:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        yield bad("python", f"{version}, and {oldest} is the oldest that works", "install a newer")


def check_packages() -> Iterator[Finding]:
    """Compare each installed package with the version that this backend was tested with."""
    try:
        texts = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        yield warning(
            "packages", f"{DISTRIBUTION} is not installed here, only its files are", CHECKOUT
        )
        return
    needed = [Requirement(text) for text in texts]
    always = [each for each in needed if each.marker is None or each.marker.evaluate()]
    wrong = [finding for each in always if (finding := compared(each))]
    yield from wrong
    if not wrong:
        pinned = (each.name for each in always if "==" in str(each.specifier))
        yield good("packages", ", ".join(f"{name} {version_of(name)}" for name in pinned))


def check_extras() -> Iterator[Finding]:
    """Look for optional packages."""
    for extra, (module, use) in EXTRAS.items():
        if _is_importable(module):
            yield good(f"extra {extra}", "installed")
        else:
            yield warning(f"extra {extra}", MISSING_EXTRA.format(use), install_command(extra))
    if _is_importable("mlx_vlm"):
        yield good("mlx-vlm", version_of("mlx-vlm"))
    else:
        text = MISSING_EXTRA.format("models that see or hear, and no encoders")
        yield warning("mlx-vlm", text, vision_command())


def compared(requirement: Requirement) -> Finding | None:
    """Return the problem of an installed package, or `None`."""
    found = version_of(requirement.name)
    remedy = install_command()
    if not found:
        return bad(requirement.name, "not installed", remedy)
    if requirement.specifier.contains(found, prereleases=True):
        return None
    text = f"{found}, and this backend was tested with {requirement.specifier}"
    return warning(requirement.name, text, remedy)


def _is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


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
    elif probe["device"] == "gpu":
        yield good("gpu memory", f"{decimal(probe['memory'])}, shared by all backends on it")


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
    return good("wired limit", text, remedy)


HOST_PROGRAM = "local-ai"
LOW_DISK = 20 * 10**9
_TIMEOUT_S = 10.0


def check_address(address: str) -> Iterator[Finding]:
    """Try to listen."""
    try:
        path = socket_path(address)
        if path is not None:
            probe_socket(address, path)
        else:
            probe_port(address, *split_address(address))
    except AddressError as error:
        if backend := asyncio.run(_backend_at(address)):
            yield good("address", f"{address}: {backend}")
        else:
            yield bad("address", str(error), _other_address())
    else:
        yield good("address", f"{address} is free")


async def _backend_at(address: str) -> str:
    """Return a description of the backend that listens there; empty if there is none."""
    async with BackendClient(_reachable(address)) as client:
        try:
            model = (await inspect(client)).report.model.name
        except CallError as error:
            is_ours = error.code is grpc.StatusCode.UNAUTHENTICATED
            return "a backend with a token runs there" if is_ours else ""
    return f"a backend runs there, with {model or 'no model'}"


def _reachable(address: str) -> str:
    """Return where this machine calls a server that listens on all addresses."""
    return re.sub(r"^(0\.0\.0\.0|\[::\])(?=:)", "127.0.0.1", address)


def check_models(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check the download folder for hub models."""
    home = Path(environment.get("HOME") or "~").expanduser()
    cache = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    name = "HF_HUB_CACHE" if environment.get("HF_HUB_CACHE") else "HF_HOME"
    hub = Path(environment.get(name) or cache / "huggingface")
    yield _folder("models", hub, f"set {name} to a folder that can be written")


def check_cache(folder: Path | None) -> Iterator[Finding]:
    """Check the folder of the prompt cache on disk, if one is given."""
    if folder is None:
        return
    remedy = "give the option cache_dir a folder that can be written"
    try:
        tuning_options([f"cache_dir:{folder}"], "")
        folder = folder.expanduser()
        _require_own_cache(folder)
    except BackendError as error:
        yield bad("cache", str(error).removeprefix("Options: "), remedy)
    except OSError as error:
        yield bad("cache", _told(error, folder), remedy)
    else:
        yield _folder("cache", folder, remedy)


def _require_own_cache(folder: Path) -> None:
    # Needs MLX, whose absence has a finding of its own.
    with suppress(ImportError):
        from backend.cache.node_files import require_own_folder

        require_own_folder(folder)


def check_host() -> Iterator[Finding]:
    """Ask LocalAI for its version, if it is on the path."""
    program = shutil.which(HOST_PROGRAM)
    if program is None:
        return
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(  # noqa: S603 - the host's own program
            [program, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        lines = (done.stdout or done.stderr).strip().splitlines()
        yield good("host", f"LocalAI {lines[-1]}" if lines else f"{program} tells no version")


def _folder(subject: str, folder: Path, remedy: str) -> Finding:
    """Write a file into a folder, or into the nearest one above it that exists."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        return bad(subject, _told(error, folder), remedy)
    free = shutil.disk_usage(there).free
    text = f"{folder}, {decimal(free)} free"
    if free < LOW_DISK:
        return warning(subject, text, f"free some space, or {remedy}")
    return good(subject, text)


def _told(error: OSError, folder: Path) -> str:
    return f"{folder}: {error.strerror}" if error.strerror else str(error)


def _other_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"serve --addr 127.0.0.1:{free.getsockname()[1]}"


_MARKS = {
    Verdict.GOOD: Text(Verdict.GOOD, "green"),
    Verdict.WARNING: Text(Verdict.WARNING, "yellow"),
    Verdict.BAD: Text(Verdict.BAD, ERROR_STYLE),
}


@click.command("doctor")
@click.option(
    "--addr",
    "address",
    default=DEFAULT_ADDRESS,
    show_default=True,
    metavar="HOST:PORT|unix:PATH",
    help="Address that the backend will listen on.",
)
@click.option(
    "--cache-dir",
    type=click.Path(path_type=Path),
    help="Folder of the prompt cache on disk, as in the option cache_dir.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per finding.")
def command(*, address: str, cache_dir: Path | None, as_json: bool) -> None:
    """Check this machine and suggest fixes.

    Exit code 1 if something is wrong.
    """
    findings = list(_findings(address, cache_dir))
    if as_json:
        for finding in findings:
            click.echo(json.dumps(asdict(finding)))
    else:
        Console().print(_table(findings))
    if any(finding.verdict is Verdict.BAD for finding in findings):
        sys.exit(1)


def _findings(address: str, cache_dir: Path | None) -> Iterator[Finding]:
    yield from check_python()
    yield from check_packages()
    yield from check_extras()
    yield from check_device(os.environ)
    yield from check_blas(os.environ)
    yield from check_memory()
    yield from check_address(address)
    yield from check_models(os.environ)
    yield from check_cache(cache_dir)
    yield from check_host()


def _table(findings: list[Finding]) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in range(2):
        table.add_column(no_wrap=True)
    # A command is whole, however narrow the terminal.
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(printable(finding.text))
        if finding.remedy:
            text.append(printable(f"\n→ {finding.remedy}"), QUIET_STYLE)
        table.add_row(_MARKS[finding.verdict], printable(finding.subject), text)
    return table


# The backend first, then the libraries whose versions decide which models and features work.
_PACKAGES = ("mlx-grpc-backend", "mlx", "mlx-lm", "mlx-vlm", "transformers", "grpcio")


@click.command("version")
def version() -> None:
    """Print the versions of the backend, its libraries and Python."""
    rows = [(name, version_of(name) or "not installed") for name in _PACKAGES]
    rows += [("python", platform.python_version()), ("system", platform.platform())]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        click.echo(f"{name:<{width}}  {text}")
