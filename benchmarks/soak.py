"""The soak: clients of every kind at once for minutes; nothing is lost, mixed up or left behind.

    python -m benchmarks.soak --minutes 1

Each request has one right reply, which was computed alone beforehand. The exit code is 1 if
anything was wrong.
"""

import asyncio
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import click
import grpc.aio

from backend.cli.server_process import ServerProcess
from backend.demo import MODEL_DIR
from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc
from benchmarks.soak_clients import Answer, Client, Tally, answer, watch_health
from benchmarks.soak_requests import Ask, asks

CLIENTS = 32
# In bfloat16 logits tie, and then it counts whether a prefix was computed or stored: a lost engine
# takes the prompt cache along.
DTYPE = "float32"
REQUESTS = 160
CACHE_BYTES = 8 * 2**20
# Beside the prompt cache, once everything has been used.
MAX_GROWTH_BYTES = 64 * 2**20
SETTLING_SHARE = 0.25
SETTLED_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.05
SHOWN_FAULTS = 10
# The last one loses the device, by the fault that the server is started with.
LOSSES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP, signal.SIGUSR1)
FAULT = {"MLX_BACKEND_TEST_FAULT": "usr1:"}
STOPPED_AFTER_S = 3

Stub: TypeAlias = backend_pb2_grpc.BackendStub


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long, how many clients, and how many different requests they choose from.

    Attributes:
        kill_every_s: How long an engine process may work before it is lost; 0 spares them all.
    """

    seconds: float
    clients: int = CLIENTS
    requests: int = REQUESTS
    seed: int = 0
    kill_every_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a soak came to; sizes in bytes.

    Attributes:
        ends: How often calls ended how.
        faults: What was wrong, in words; empty when all is well.
        resident_bytes: After settling, and at the end.
        restarts: Engine processes that were replaced.
    """

    seconds: float
    ends: dict[str, int]
    faults: list[str]
    health_p99_ms: float
    health_max_ms: float
    resident_bytes: tuple[int, int]
    prompt_cache_bytes: int
    kv_active_bytes: int
    restarts: int


async def soak(plan: Plan, address: str, pid: int) -> Report:
    """Let clients loose on a server without a model, and report what became of it."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = backend_pb2_grpc.BackendStub(channel)
        await stub.LoadModel(
            pb.ModelOptions(
                Model=str(MODEL_DIR),
                DType=DTYPE,
                Options=[
                    f"max_cache_bytes:{CACHE_BYTES}",
                    *([f"engine_timeout_s:{STOPPED_AFTER_S}"] if plan.kill_every_s else []),
                ],
            )
        )
        references = await _references(stub, asks(plan.requests, plan.seed))
        tally = Tally()
        started = time.monotonic()
        end = started + plan.seconds
        seeds = range(plan.seed, plan.seed + plan.clients)
        crowd = [Client(address, references, tally, seed) for seed in seeds]
        settled, *_ = await asyncio.gather(
            _resident_after(plan.seconds * SETTLING_SHARE, pid),
            watch_health(address, tally, end),
            lose_engines(channel, plan.kill_every_s, end),
            *(client.run_until(end) for client in crowd),
        )
        books = await _settled_books(channel, tally)
        restarts = (await _inspect(channel)).restarts
        await _compare_again(stub, references, tally)
    return _report(
        time.monotonic() - started, tally, (settled, _resident_bytes(pid)), books, restarts
    )


async def _references(stub: Stub, requests: Sequence[Ask]) -> dict[Ask, Answer]:
    return {ask: await answer(stub, ask) for ask in requests}


async def _compare_again(stub: Stub, references: Mapping[Ask, Answer], tally: Tally) -> None:
    """Ask for everything once more, alone: what was stored meanwhile is what it was."""
    for ask, expected in references.items():
        if not (await answer(stub, ask)).matches(expected):
            tally.faults.append(f"{ask.shape}: another reply after the soak")


async def _settled_books(channel: grpc.aio.Channel, tally: Tally) -> dict[str, int]:
    """Return the memory by part, once nothing waits or runs; note what stays behind."""
    deadline = time.monotonic() + SETTLED_TIMEOUT_S
    while True:
        reply = await _inspect(channel)
        memory: dict[str, int] = dict(reply.memory.breakdown)
        left = len(reply.requests) + reply.slots_taken + reply.waiting
        if not left and memory["kv_active"] == 0:
            return memory
        if time.monotonic() > deadline:
            tally.faults.append(
                f"left behind: {reply.slots_taken} slots, {reply.waiting} waiting, "
                f"{len(reply.requests)} requests, {memory['kv_active']} bytes of KV"
            )
            return memory
        await asyncio.sleep(POLL_INTERVAL_S)


async def lose_engines(channel: grpc.aio.Channel, every_s: float, end: float) -> None:
    """End the engine process again and again, each time in another way, until the soak is over.

    The next one is left alone until it has worked for so long.
    """
    for kind in itertools.cycle(LOSSES if every_s else ()):
        await asyncio.sleep(every_s)
        engine = await _engine(channel)
        if time.monotonic() > end:
            return
        os.kill(engine, kind)
        while await _engine(channel) == engine:  # noqa: ASYNC110 (another process is watched)
            await asyncio.sleep(POLL_INTERVAL_S)


async def _engine(channel: grpc.aio.Channel) -> int:
    """Return the number of the engine process, once there is one."""
    while True:
        for process in (await _inspect(channel)).processes:
            if process.role == "engine":
                return int(process.process_id)
        await asyncio.sleep(POLL_INTERVAL_S)


async def _inspect(channel: grpc.aio.Channel) -> pb.InspectReply:
    return await backend_pb2_grpc.InspectorStub(channel).Inspect(pb.InspectRequest())


async def _resident_after(seconds: float, pid: int) -> int:
    await asyncio.sleep(seconds)
    return _resident_bytes(pid)


def _resident_bytes(pid: int) -> int:
    command = ["ps", "-o", "rss=", "-p", str(pid)]
    return int(subprocess.check_output(command, text=True)) * 1024


def _report(
    seconds: float,
    tally: Tally,
    resident: tuple[int, int],
    books: dict[str, int],
    restarts: int,
) -> Report:
    faults = list(tally.faults)
    if books["prompt_cache"] > CACHE_BYTES:
        faults.append(f"the prompt cache holds {books['prompt_cache']} of {CACHE_BYTES} bytes")
    if resident[1] - resident[0] > MAX_GROWTH_BYTES:
        faults.append(f"the process grew by {resident[1] - resident[0]} bytes")
    health = sorted(tally.health_s)
    return Report(
        seconds=round(seconds, 1),
        ends=dict(sorted(tally.ends.items())),
        faults=faults,
        health_p99_ms=round(health[math.ceil(0.99 * len(health)) - 1] * 1e3, 1),
        health_max_ms=round(health[-1] * 1e3, 1),
        resident_bytes=resident,
        prompt_cache_bytes=books["prompt_cache"],
        kv_active_bytes=books["kv_active"],
        restarts=restarts,
    )


async def run(plan: Plan) -> Report:
    """Start a server as a host does, soak it, and stop it."""
    environment = os.environ | (FAULT if plan.kill_every_s else {})
    with (
        TemporaryDirectory(prefix="mlx-backend-soak-") as directory,
        ServerProcess.start(Path(directory) / "server.log", environment=environment) as process,
    ):
        await process.wait_until_ready()
        return await soak(plan, process.address, process.pid)


@click.command()
@click.option("--minutes", default=10.0, show_default=True, help="How long.")
@click.option("--clients", default=CLIENTS, show_default=True, help="How many at once.")
@click.option("--seed", default=0, show_default=True, help="Of all random choices.")
@click.option("--kill-every", default=0.0, metavar="SECONDS", help="Lose the engine so often.")
def main(*, minutes: float, clients: int, seed: int, kill_every: float) -> None:
    """Let clients of every kind loose on a backend, and compare each reply with the right one."""
    plan = Plan(seconds=60.0 * minutes, clients=clients, seed=seed, kill_every_s=kill_every)
    report = asyncio.run(run(plan))
    shown = asdict(report) | {"faults": report.faults[:SHOWN_FAULTS]}
    click.echo(json.dumps(shown, indent=2, ensure_ascii=False))
    sys.exit(f"{len(report.faults)} faults" if report.faults else 0)


if __name__ == "__main__":
    main()
