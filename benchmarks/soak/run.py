"""The soak: clients of every kind at once for minutes; nothing may be lost, mixed up or leaked.

    python -m benchmarks.soak --minutes 1

Each request has one correct reply, computed alone beforehand. The exit code is 1 if
anything was wrong.
"""

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import click
import grpc.aio

from backend.cli.server_process import ServerProcess, server_command
from backend.demo import MODEL_DIR
from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc
from benchmarks.harness.models import ROOT
from benchmarks.soak.attackers import Attacker, kill_helpers
from benchmarks.soak.bystander import Watch, watch_apart
from benchmarks.soak.clients import Answer, Client, Tally, answer
from benchmarks.soak.host import Host, Replacements, on_small_disk
from benchmarks.soak.soak_requests import Ask, asks
from common.machine_memory import resident_bytes
from common.openblas import find_openblas, is_wanted, preloading
from scripts.faulty_rank import VARIABLE

CLIENTS = 32
# In bfloat16 logits tie, and then it matters whether a prefix was computed or stored: a lost engine
# takes the prompt cache along.
DTYPE = "float32"
REQUESTS = 160
CACHE_BYTES = 8 * 2**20
# Without the prompt cache, once everything has been used.
MAX_GROWTH_BYTES = 64 * 2**20
MAX_GROWTH_DESCRIPTORS = 32
PARTS, SETTLED_PARTS = 12, 3
SETTLED_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.05
# Before the clients, and at most such a part of their time.
IDLE_S, IDLE_SHARE = 10.0, 0.1
# Of the clients' time without attackers, which are compared with it.
COMPANY_SHARE = 0.4
SHOWN_FAULTS = 10
# The last one loses the device, by a fault injected at the server's start.
LOSSES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP, signal.SIGUSR1)
FAULT = {VARIABLE: "usr1:", "PYTHONPATH": str(ROOT)}
# A turn of a published model takes longer on a machine that does other work.
STOPPED_AFTER_S, REAL_STOPPED_AFTER_S = 3, 60
# Below the directory of a soak.
DISK, INCOMPLETE, EMPTY = "disk", "incomplete", "empty"
FULL = "No space left on device"

Stub: TypeAlias = backend_pb2_grpc.BackendStub


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The duration, the number of clients, and the number of different requests.

    Attributes:
        kill_every_s: Lifetime of an engine process before it is killed; 0 never kills.
        replace_every_s: Time between the host's replacements of the model; 0 is never.
        has_small_disk: Whether the prompt cache is on a disk that is soon full.
        attackers: Their number. With any, helper processes of the server are killed too.
        model: A decoder's directory.
    """

    seconds: float
    clients: int = CLIENTS
    requests: int = REQUESTS
    seed: int = 0
    kill_every_s: float = 0.0
    replace_every_s: float = 0.0
    has_small_disk: bool = False
    attackers: int = 0
    model: Path = MODEL_DIR


@dataclass(frozen=True, slots=True)
class Measure:
    """The server process's memory in bytes, descriptors and threads."""

    resident_bytes: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Watched:
    """The part of a report that is collected while the clients run.

    Attributes:
        measures: From before the clients start until they have left.
        idle: Times of a bystander alone with the server, before.
        company: Times of a bystander beside the clients, before the attackers come; none without.
        beside: Times of a bystander beside all others.
        losses: Engine processes killed.
        replaced: The host's replacements of the model, with counts.
    """

    measures: list[Measure]
    idle: Watch
    company: Watch | None
    beside: Watch
    losses: int
    replaced: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a soak; sizes in bytes.

    Attributes:
        calls: Their number.
        ends: The ends of calls, with counts.
        faults: Descriptions of failures; empty if there are none.
        last: Measured after everything else.
        restarts: The number since the last load.
        disk_tokens: Read back from disk since the last load.
    """

    seconds: float
    calls: int
    ends: dict[str, int]
    faults: list[str]
    watched: Watched
    last: Measure
    prompt_cache_bytes: int
    kv_active_bytes: int
    restarts: int
    disk_bytes: int
    disk_tokens: int


async def soak(plan: Plan, address: str, pid: int, directory: Path) -> Report:
    """Run clients on a server without a model, and report the result.

    Args:
        plan: The plan of the soak.
        address: The server's address.
        pid: The server's process id.
        directory: For files; the small disk is mounted below it, for the server alone.
    """
    async with grpc.aio.insecure_channel(address) as channel:
        stub = backend_pb2_grpc.BackendStub(channel)
        host = Host(stub, _options(plan, directory), directory / INCOMPLETE, Replacements())
        await host.load()
        references = await _references(stub, asks(plan.requests, plan.seed))
        tally = Tally()
        idle = await watch_apart(address, min(IDLE_S, IDLE_SHARE * plan.seconds))
        started = time.monotonic()
        end = started + plan.seconds
        seeds = range(plan.seed, plan.seed + plan.clients)
        clients = [Client(address, references, tally, host.replacements, seed) for seed in seeds]
        attackers = [
            Attacker(address, directory / EMPTY, plan.model, tally, seed)
            for seed in range(plan.attackers)
        ]
        async with asyncio.TaskGroup() as group:
            measures = group.create_task(_measures(plan.seconds, pid))
            losses = group.create_task(lose_engines(channel, plan.kill_every_s, end))
            group.create_task(host.run_until(end, plan.replace_every_s))
            for client in clients:
                group.create_task(client.run_until(end))
            company = None
            if attackers:
                company = await watch_apart(address, COMPANY_SHARE * plan.seconds)
                group.create_task(kill_helpers(pid, end, tally))
            for attacker in attackers:
                group.create_task(attacker.run_until(end))
            beside = await watch_apart(address, max(end - time.monotonic(), 0.0))
        watched = Watched(
            measures.result(), idle, company, beside, losses.result(), dict(host.done)
        )
        await _settled(channel, tally)
        await _compare_again(stub, references, tally)
        reply = await _settled(channel, tally)
    tally.faults += host.faults
    seconds = time.monotonic() - started
    return _report(seconds, tally, reply, watched, _measure(pid))


def _options(plan: Plan, directory: Path) -> pb.ModelOptions:
    stopped_after_s = STOPPED_AFTER_S if plan.model == MODEL_DIR else REAL_STOPPED_AFTER_S
    return pb.ModelOptions(
        Model=str(plan.model),
        DType=DTYPE,
        Options=[
            f"max_cache_bytes:{CACHE_BYTES}",
            *([f"engine_timeout_s:{stopped_after_s}"] if plan.kill_every_s else []),
            *([f"cache_dir:{directory / DISK}"] if plan.has_small_disk else []),
        ],
    )


async def _references(stub: Stub, requests: Sequence[Ask]) -> dict[Ask, Answer]:
    return {ask: await answer(stub, ask) for ask in requests}


async def _compare_again(stub: Stub, references: Mapping[Ask, Answer], tally: Tally) -> None:
    """Send everything once more, alone, to check the stored prefixes."""
    for ask, expected in references.items():
        if not (await answer(stub, ask)).matches(expected):
            tally.faults.append(f"{ask.shape}: another reply after the soak")


async def _settled(channel: grpc.aio.Channel, tally: Tally) -> pb.InspectReply:
    """Return the backend's report once it is idle; record leftovers."""
    deadline = time.monotonic() + SETTLED_TIMEOUT_S
    while True:
        reply = await _inspect(channel)
        memory: dict[str, int] = dict(reply.memory.breakdown)
        left = len(reply.requests) + reply.slots_taken + reply.waiting
        if not left and memory["kv_active"] == 0:
            return reply
        if time.monotonic() > deadline:
            tally.faults.append(
                f"left behind: {reply.slots_taken} slots, {reply.waiting} waiting, "
                f"{len(reply.requests)} requests, {memory['kv_active']} bytes of KV"
            )
            return reply
        await asyncio.sleep(POLL_INTERVAL_S)


async def lose_engines(channel: grpc.aio.Channel, every_s: float, end: float) -> int:
    """Kill the engine process repeatedly, in varying ways, until the soak is over.

    Each new one is left alone for `every_s`.

    Returns:
        The number of kills.
    """
    losses = 0
    for kind in itertools.cycle(LOSSES if every_s else ()):
        await asyncio.sleep(every_s)
        engine = await _engine(channel)
        if time.monotonic() > end:
            break
        losses += 1
        await _lose(channel, engine, kind)
    return losses


async def _lose(channel: grpc.aio.Channel, engine: int, kind: signal.Signals) -> None:
    # A host may have ended it meanwhile.
    with suppress(ProcessLookupError):
        os.kill(engine, kind)
    while await _engine(channel) == engine:  # noqa: ASYNC110 (another process is watched)
        await asyncio.sleep(POLL_INTERVAL_S)


async def _engine(channel: grpc.aio.Channel) -> int:
    """Return the id of the engine process, once there is one."""
    while True:
        for process in (await _inspect(channel)).processes:
            if process.role == "engine":
                return int(process.process_id)
        await asyncio.sleep(POLL_INTERVAL_S)


async def _inspect(channel: grpc.aio.Channel) -> pb.InspectReply:
    return await backend_pb2_grpc.InspectorStub(channel).Inspect(pb.InspectRequest())


async def _measures(seconds: float, pid: int) -> list[Measure]:
    """Return the server's measures at the start and after each part of the time."""
    measures = [_measure(pid)]
    for _ in range(PARTS):
        await asyncio.sleep(seconds / PARTS)
        measures.append(_measure(pid))
    return measures


def _measure(pid: int) -> Measure:
    process = Path(f"/proc/{pid}")
    if not process.exists():
        command = ["ps", "-o", "rss=", "-p", str(pid)]
        return Measure(int(subprocess.check_output(command, text=True)) * 1024, 0, 0)
    counts = (len(list((process / name).iterdir())) for name in ("fd", "task"))
    return Measure(resident_bytes(pid), *counts)


def _report(
    seconds: float, tally: Tally, reply: pb.InspectReply, watched: Watched, last: Measure
) -> Report:
    books = reply.memory.breakdown
    return Report(
        seconds=round(seconds, 1),
        calls=tally.ends.total(),
        ends=dict(sorted(tally.ends.items())),
        faults=[
            *tally.faults,
            *(f"Health: {answer}" for answer in watched.beside.wrong),
            *_growth(watched.measures[SETTLED_PARTS], last),
            *_excess(books["prompt_cache"]),
        ],
        watched=watched,
        last=last,
        prompt_cache_bytes=books["prompt_cache"],
        kv_active_bytes=books["kv_active"],
        restarts=reply.restarts,
        disk_bytes=reply.prompt_cache.disk.bytes,
        disk_tokens=reply.prompt_cache.disk.read_tokens,
    )


def _growth(settled: Measure, last: Measure) -> Iterator[str]:
    if last.resident_bytes - settled.resident_bytes > MAX_GROWTH_BYTES:
        yield f"the process grew by {last.resident_bytes - settled.resident_bytes} bytes"
    if last.descriptors - settled.descriptors > MAX_GROWTH_DESCRIPTORS:
        yield f"descriptors: {settled.descriptors}, and in the end {last.descriptors}"


def _excess(prompt_cache_bytes: int) -> Iterator[str]:
    if prompt_cache_bytes > CACHE_BYTES:
        yield f"the prompt cache holds {prompt_cache_bytes} of {CACHE_BYTES} bytes"


async def run(plan: Plan) -> Report:
    """Start a server as a host does, soak it, and stop it."""
    environment, server = dict(os.environ), server_command()
    if plan.kill_every_s:
        server = (sys.executable, "-m", "scripts.faulty_rank")
        if is_wanted(environment) and (library := find_openblas()):
            environment = preloading(environment, library)
        environment |= FAULT
    with TemporaryDirectory(prefix="mlx-backend-soak-") as name:
        directory, log = Path(name), Path(name) / "server.log"
        for made in (DISK, INCOMPLETE, EMPTY):
            (directory / made).mkdir()
        shutil.copy(plan.model / "config.json", directory / INCOMPLETE)
        disk = on_small_disk(directory / DISK) if plan.has_small_disk else ()
        command = (*disk, *server)
        with ServerProcess.start(log, command=command, environment=environment) as process:
            await process.wait_until_ready()
            report = await soak(plan, process.address, process.pid, directory)
        if plan.has_small_disk and FULL not in log.read_text(encoding="utf-8", errors="replace"):
            report.faults.append("the disk has never been full")
    return report


@click.command()
@click.option("--minutes", default=10.0, show_default=True, help="How long.")
@click.option("--clients", default=CLIENTS, show_default=True, help="How many at once.")
@click.option("--attackers", default=0, show_default=True, help="How many callers of bad will.")
@click.option(
    "--model",
    default=MODEL_DIR,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A decoder in place of the embedded one.",
)
@click.option("--requests", default=REQUESTS, show_default=True, help="How many different ones.")
@click.option("--seed", default=0, show_default=True, help="Of all random choices.")
@click.option(
    "--kill-every", "kill_every_s", default=0.0, metavar="SECONDS", help="Lose the engine so often."
)
@click.option(
    "--replace-every",
    "replace_every_s",
    default=0.0,
    metavar="SECONDS",
    help="Load again so often.",
)
@click.option(
    "--small-disk", "has_small_disk", is_flag=True, help="Cache on a disk that gets full."
)
def main(minutes: float, **options: float | bool | Path) -> None:
    """Run clients of every kind on a backend, and compare each reply with the correct one."""
    plan = Plan(seconds=60.0 * minutes, **options)
    report = asyncio.run(run(plan))
    shown = asdict(report) | {"faults": report.faults[:SHOWN_FAULTS]}
    click.echo(json.dumps(shown, indent=2, ensure_ascii=False))
    sys.exit(f"{len(report.faults)} faults" if report.faults else 0)
