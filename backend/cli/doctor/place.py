"""Checks of the surroundings: the address, the folders for models and prompt cache, the host."""

import asyncio
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import grpc
from rich.filesize import decimal

from backend.cli.client import BackendClient, CallError
from backend.cli.doctor.finding import Finding, bad, good, warning
from backend.cli.inspection import inspect
from common.address import AddressError, probe_port, probe_socket, socket_path, split_address

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
    """Return what is known of a backend that listens there; empty if there is none."""
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
    hub = Path(environment.get("HF_HOME") or cache / "huggingface")
    yield _folder("models", hub, "set HF_HOME to a folder that can be written")


def check_cache(folder: Path | None) -> Iterator[Finding]:
    """Check the folder of the prompt cache on disk, if one is given."""
    if folder is not None:
        yield _folder("cache", folder, "give the option cache_dir a folder that can be written")


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
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        return bad(subject, f"{there}: {error.strerror or error}", remedy)
    free = shutil.disk_usage(there).free
    text = f"{folder}, {decimal(free)} free"
    if free < LOW_DISK:
        return warning(subject, text, f"free some space, or {remedy}")
    return good(subject, text)


def _other_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"serve --addr 127.0.0.1:{free.getsockname()[1]}"
