"""A backend in a process of its own, and the system's figures about it."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from backend.cli.server_process import ServerProcess, server_command
from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc

TIMEOUT_S = 120.0
MEGABYTE = 1e6


@dataclass
class RealBackend:
    """A running process, a channel to it, and its log."""

    channel: grpc.Channel
    process: ServerProcess
    log: Path

    @property
    def stub(self) -> Any:
        return backend_pb2_grpc.BackendStub(self.channel)

    @property
    def inspector(self) -> Any:
        return backend_pb2_grpc.InspectorStub(self.channel)

    @property
    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def resident_mb(self) -> float:
        """The memory that the process holds."""
        return self._told_mb("VmRSS:")

    @property
    def peak_mb(self) -> float:
        """The most that it ever held."""
        return self._told_mb("VmHWM:")

    def _told_mb(self, name: str) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        (line,) = [line for line in status.splitlines() if line.startswith(name)]
        return int(line.split()[1]) * 1024 / MEGABYTE

    def load(self, directory: Path | str, **options: Any) -> None:
        """Load a model."""
        request = pb.ModelOptions(Model=str(directory), **options)
        assert self.stub.LoadModel(request, timeout=TIMEOUT_S).success

    def is_idle(self) -> bool:
        """Tell whether nothing waits or runs."""
        reply = self.inspector.Inspect(pb.InspectRequest(), timeout=TIMEOUT_S)
        return not (reply.slots_taken or reply.waiting or reply.requests)


@contextmanager
def real_backends(
    directory: Path, count: int, environment: dict[str, str]
) -> Iterator[list[RealBackend]]:
    """Start several backends at once, with a log each, and end them."""
    with ExitStack() as cleanup:
        logs = [directory / f"log{number}" for number in range(count)]
        processes = [
            cleanup.enter_context(ServerProcess.start(log, environment=environment)) for log in logs
        ]
        backends = []
        for process, log in zip(processes, logs, strict=True):
            asyncio.run(process.wait_until_ready())
            channel = cleanup.enter_context(grpc.insecure_channel(process.address))
            backends.append(RealBackend(channel, process, log))
        yield backends


@contextmanager
def real_backend(
    log: Path,
    environment: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
    token: str = "",
) -> Iterator[RealBackend]:
    """Start a backend by a command before its own, and end it."""
    command = (*prefix, *server_command())
    with ServerProcess.start(log, command=command, environment=environment) as process:
        asyncio.run(process.wait_until_ready(token))
        with grpc.insecure_channel(process.address) as channel:
            yield RealBackend(channel, process, log)


def read_until_written(stream: Any, *files: Path) -> None:
    """Take replies until processes have written some files, or to the end, and leave."""
    for _ in stream:
        if all(file.exists() for file in files):
            break
    stream.cancel()


def child_jobs() -> list[int]:
    """Return the processes that this one has started as jobs, forked or not."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
            name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
        except (OSError, ValueError):
            continue
        is_job = name == "backend.jobs" or b"backend.jobs" in words
        if is_job and int(rest.split()[1]) == os.getpid():
            found.append(int(entry.name))
    return found
