"""A caller beside the others, in a process of its own: it asks for Health and first tokens."""

import asyncio
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Self, TypeVar

import click
import grpc

from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc

T = TypeVar("T")

HEALTH_INTERVAL_S, TOKEN_INTERVAL_S = 0.05, 0.5
FIRST_TOKEN_TIMEOUT_S = 120.0
_ASK = pb.PredictOptions(
    UseTokenizerTemplate=True, Tokens=1, Messages=[pb.Message(role="user", content="Hello!")]
)


@dataclass(frozen=True, slots=True)
class Times:
    """Times in milliseconds of calls of one kind, of which there was at least one."""

    calls: int
    median_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, took_s: Sequence[float]) -> Self:
        """Return the figures of some times in seconds."""
        p99 = sorted(took_s)[math.ceil(0.99 * len(took_s)) - 1]
        figures = (median(took_s), p99, max(took_s))
        return cls(len(took_s), *(round(1e3 * each, 1) for each in figures))


@dataclass(frozen=True, slots=True)
class Watch:
    """The calls of one watch.

    Attributes:
        late: Delays with which the watching process woke up from its pauses. It waits for a core
            as the server does, so this is the machine's part.
        wrong: Answers of Health other than OK.
    """

    health: Times
    first_token: Times
    late: Times
    wrong: list[str]


def watch(address: str, seconds: float) -> Watch:
    """Call Health again and again, and beside it ask for first tokens.

    Raises:
        grpc.RpcError: A call of Health failed.
    """
    end = time.monotonic() + seconds
    health_s: list[float] = []
    late_s: list[float] = []
    wrong: list[str] = []
    with grpc.insecure_channel(address) as channel:
        stub = backend_pb2_grpc.BackendStub(channel)
        stub.Health(pb.HealthMessage(), wait_for_ready=True)
        with _first_tokens(stub, end) as token_s:
            while time.monotonic() < end or not health_s:
                reply, took_s = _timed(lambda: stub.Health(pb.HealthMessage()))
                health_s.append(took_s)
                _, paused_s = _timed(lambda: time.sleep(HEALTH_INTERVAL_S))
                late_s.append(paused_s - HEALTH_INTERVAL_S)
                if reply.message != b"OK":
                    wrong.append(repr(reply.message))
    return Watch(Times.of(health_s), Times.of(token_s), Times.of(late_s), wrong)


@contextmanager
def _first_tokens(stub: backend_pb2_grpc.BackendStub, end: float) -> Iterator[list[float]]:
    """Collect times of first tokens on a thread.

    A stream that fails, as when the model is replaced, counts with its time.
    """
    took_s: list[float] = []

    def ask() -> None:
        while time.monotonic() < end or not took_s:
            _, each_s = _timed(lambda: _first_token(stub))
            took_s.append(each_s)
            time.sleep(TOKEN_INTERVAL_S)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield took_s
    finally:
        thread.join()


def _first_token(stub: backend_pb2_grpc.BackendStub) -> None:
    try:
        next(iter(stub.PredictStream(_ASK, timeout=FIRST_TOKEN_TIMEOUT_S)), None)
    except grpc.RpcError:
        return


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    """Return the result of a call and its seconds."""
    started = time.perf_counter()
    return call(), time.perf_counter() - started


async def watch_apart(address: str, seconds: float) -> Watch:
    """Watch in another process.

    Raises:
        RuntimeError: A call failed; the message is the end of the process's error output.
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
    found = json.loads(out)
    kinds = {kind: Times(**found[kind]) for kind in ("health", "first_token", "late")}
    return Watch(**kinds, wrong=found["wrong"])


@click.command()
@click.argument("address")
@click.argument("seconds", type=float)
def main(address: str, seconds: float) -> None:
    """Watch a server, and print the result as JSON."""
    click.echo(json.dumps(asdict(watch(address, seconds))))


if __name__ == "__main__":
    main()
