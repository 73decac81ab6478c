"""A host that asks for Health all the time, in a process that does nothing else."""

import asyncio
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import click
import grpc

from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc

INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class HealthReport:
    """The calls of one watch; times in milliseconds.

    Attributes:
        late_p99_ms: Of the delays with which the watching process woke up from its pauses. It
            waits for a core as the server does, so this is the machine's part.
        wrong: Answers other than OK.
    """

    calls: int
    p99_ms: float
    max_ms: float
    late_p99_ms: float
    late_max_ms: float
    wrong: list[str]

    @classmethod
    def of(cls, took_s: Sequence[float], late_s: Sequence[float], wrong: list[str]) -> Self:
        """Return the report of at least one call."""
        return cls(
            len(took_s), _p99_ms(took_s), _ms(max(took_s)), _p99_ms(late_s), _ms(max(late_s)), wrong
        )


def watch(address: str, seconds: float) -> HealthReport:
    """Call Health again and again.

    Raises:
        grpc.RpcError: A call failed.
    """
    took_s: list[float] = []
    late_s: list[float] = []
    wrong: list[str] = []
    end = time.monotonic() + seconds
    with grpc.insecure_channel(address) as channel:
        stub = backend_pb2_grpc.BackendStub(channel)
        stub.Health(pb.HealthMessage(), wait_for_ready=True)
        while time.monotonic() < end or not took_s:
            started = time.perf_counter()
            reply = stub.Health(pb.HealthMessage())
            answered = time.perf_counter()
            time.sleep(INTERVAL_S)
            took_s.append(answered - started)
            late_s.append(time.perf_counter() - answered - INTERVAL_S)
            if reply.message != b"OK":
                wrong.append(repr(reply.message))
    return HealthReport.of(took_s, late_s, wrong)


async def watch_apart(address: str, seconds: float) -> HealthReport:
    """Watch in another process.

    Raises:
        RuntimeError: A call failed; the message is the end of what the process said.
    """
    command = ("-m", __spec__.name, address, str(seconds))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=pipe, stderr=pipe
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"Health: {err.decode()[-1000:]}")
    return HealthReport(**json.loads(out))


def _p99_ms(seconds: Sequence[float]) -> float:
    return _ms(sorted(seconds)[math.ceil(0.99 * len(seconds)) - 1])


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)


@click.command()
@click.argument("address")
@click.argument("seconds", type=float)
def main(address: str, seconds: float) -> None:
    """Watch the Health of a server, and print the report as JSON."""
    report = watch(address, seconds)
    click.echo(json.dumps({name: getattr(report, name) for name in HealthReport.__slots__}))


if __name__ == "__main__":
    main()
