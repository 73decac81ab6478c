"""A backend as a child process, as a host starts it: own process group, no standard input.

The command line's demo, the benchmarks and the end-to-end tests use it.
"""

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Self

import click

from backend.cli.client import BackendClient, CallError, address_option_with_help
from backend.cli.serve import become_rank, become_server
from common.options import ADDRESS_SYNONYMS

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0  # hosts' time between SIGTERM and SIGKILL
LOOPBACK = "127.0.0.1"

_RUN_SCRIPT = Path(__file__).parents[2] / "run.sh"
_POLL_INTERVAL_S = 0.002
# Below those that systems give to whoever asks for any: from 32768 on Linux, 49152 on macOS.
_PORTS = range(10_000, 30_000)


class ServerError(Exception):
    """The server did not start, or ended early."""


class ServerProcess:
    """A running server; leaving it as a context stops it."""

    def __init__(self, process: subprocess.Popen[bytes], address: str, log_path: Path) -> None:
        self._process = process
        self._log_path = log_path
        self.address = address

    @classmethod
    def start(
        cls,
        log_path: Path,
        *,
        command: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Start a server on a free port; it is not ready yet.

        Args:
            command: Starts another server; `--addr HOST:PORT` is appended.
            environment: `None` is this process's own.
        """
        address = f"{LOOPBACK}:{free_port()}"
        with log_path.open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 - our own program
                [*(command or server_command()), "--addr", address],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                process_group=0,
            )
        return cls(process, address, log_path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The id of the process, and of its group."""
        return self._process.pid

    async def wait_until_ready(self, token: str = "", timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return as soon as Health answers."""
        deadline = time.monotonic() + timeout_s
        while not await self._answers(token):
            if (code := self._process.poll()) is not None:
                raise ServerError(f"the server exited with code {code}: {self.log_tail(1)}")
            if time.monotonic() > deadline:
                raise ServerError(f"the server did not answer Health within {timeout_s:.0f} s")
            await asyncio.sleep(_POLL_INTERVAL_S)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """End the server as a host does, and return its exit code; harmless if it has ended."""
        self._signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            return self._process.wait()

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of the server's log."""
        text = self._log_path.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    async def _answers(self, token: str) -> bool:
        if not _accepts(self.address):
            return False
        try:
            # A channel that failed once waits long before it retries: use a new one.
            async with BackendClient(self.address, token) as client:
                await client.check_health()
        except CallError:
            return False
        return True

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self.pid, number)


def server_command() -> tuple[str, ...]:
    """Return the command of the server: `run.sh` in a checkout, else that of `serve`."""
    if _RUN_SCRIPT.exists():
        return (str(_RUN_SCRIPT),)
    return (sys.executable, "-P", "-m", "backend.cli.serve")


def free_port() -> int:
    """Return a free port that no system hands out by itself before the server has it."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with contextlib.suppress(OSError), socket.create_server((LOOPBACK, port)):
            return port


def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


_WAYS = "Ctrl-C stops it, --model loads a model"


class _Serve(click.Command):
    """Suggests the right option to a person who writes that of another server."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(context, args)
        except click.NoSuchOption as error:
            if hint := ADDRESS_SYNONYMS.get(error.option_name):
                text = f"No such option: {error.option_name} Did you mean {hint}?"
                raise click.UsageError(text, context) from None
            raise


@click.command("serve", cls=_Serve)
@address_option_with_help("Where to listen; port 0 is any free one.")
@click.option("--model", help="Load this at once: a path, a hub id, or demo.")
@click.option("--metrics-addr", metavar="HOST:PORT", help="Where Prometheus reads metrics.")
@click.option("--dashboard", metavar="[HOST:]PORT", help="Where a browser finds the dashboard.")
@click.argument("extra", nargs=-1, metavar="")
def command(*, address: str, extra: tuple[str, ...], **options: str | None) -> NoReturn:
    """Serve until Ctrl-C; with --model, a model is ready at once.

    On a Linux CPU it preloads OpenBLAS.
    """
    if extra:
        raise click.UsageError(f"serve takes options only, not {extra[0]!r}: {_WAYS}")
    named = ((f"--{name.replace('_', '-')}", value) for name, value in options.items())
    become_server(
        ["--addr", address, *(part for name, value in named if value for part in (name, value))]
    )


@click.command(
    "rank",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def rank(arguments: tuple[str, ...]) -> NoReturn:
    """Compute a part of a model that is divided among machines.

    `rank --help` lists the arguments.
    """
    become_rank(arguments)
