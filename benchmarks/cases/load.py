"""How long until a model's first token: loaded the first time, again, and after a lost engine?"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc.aio

from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc
from benchmarks.harness.baseline import QUIET, environment_of
from benchmarks.harness.figure import Figure, Settings, at_most
from benchmarks.harness.models import LARGE, ROOT
from benchmarks.harness.served import started_server
from common.process import usable_cores

PROMPT = "Once upon a time there was"
FINDINGS = "MLX_BACKEND_FINDINGS"
FIRST, SECOND, LOST = "first time", "second time", "after a lost engine"
TARGETS = {FIRST: at_most(1.5), SECOND: at_most(1.5), LOST: at_most(2.0)}


async def measure(settings: Settings) -> list[Figure]:
    """Measure against raw mlx-lm from its exec on, in turn; other runs of both come first.

    A server is told to load as soon as it answers `Health`, as hosts do.
    """
    figures = []
    for directory in settings.directories or (LARGE.directory,):
        runs = [await _run(directory) for _ in range(settings.runs + 1)][1:]
        figures += [
            Figure(
                name=f"{directory.name}: load and first token, {name}",
                unit="x raw",
                samples=tuple(ours[name] / raw for raw, ours in runs),
                target=target,
                context={
                    "s": sorted(ours[name] for _, ours in runs)[len(runs) // 2],
                    "raw s": sorted(raw for raw, _ in runs)[len(runs) // 2],
                },
            )
            for name, target in TARGETS.items()
        ]
    return figures


async def _run(directory: Path) -> tuple[float, Mapping[str, float]]:
    """Return the seconds of raw mlx-lm, and those of a server that knows nothing at first."""
    with TemporaryDirectory(prefix="mlx-backend-bench-") as place:
        environment = {**os.environ, FINDINGS: str(Path(place) / "findings.json")}
        with started_server(environment) as process:
            await process.wait_until_ready()
            async with grpc.aio.insecure_channel(process.address) as channel:
                ours = await _loads(channel, directory)
            environment = environment_of(process.pid)
    return _raw_seconds(directory, environment), ours


async def _loads(channel: grpc.aio.Channel, directory: Path) -> Mapping[str, float]:
    stub = backend_pb2_grpc.BackendStub(channel)
    options = pb.ModelOptions(Model=str(directory))
    seconds = {}
    for name in (FIRST, SECOND):
        started = time.perf_counter()
        await stub.LoadModel(options)
        await _first_token(stub)
        seconds[name] = time.perf_counter() - started
        if name == FIRST:
            await stub.Free(pb.HealthMessage())
    reply = await backend_pb2_grpc.InspectorStub(channel).Inspect(pb.InspectRequest())
    started = time.perf_counter()
    os.kill(next(p.process_id for p in reply.processes if p.role == "engine"), signal.SIGKILL)
    await _first_token(stub)
    return {**seconds, LOST: time.perf_counter() - started}


async def _first_token(stub: backend_pb2_grpc.BackendStub) -> None:
    """Return at the first token, and let the reply end."""
    request = pb.PredictOptions(Prompt=PROMPT, Tokens=1, IgnoreEOS=True)
    async for _ in stub.PredictStream(request):
        pass


def _raw_seconds(directory: Path, environment: Mapping[str, str]) -> float:
    """Return raw mlx-lm's time from exec to its first token."""
    command = [sys.executable, "-m", "benchmarks.harness.raw_load", str(directory), PROMPT]
    threads = {"OPENBLAS_NUM_THREADS": str(usable_cores())}
    started = time.perf_counter()
    with subprocess.Popen(
        command, cwd=ROOT, env={**environment, **QUIET, **threads}, stdout=subprocess.PIPE
    ) as process:
        if process.stdout is None or not process.stdout.readline():
            raise RuntimeError("raw mlx-lm has not written a token")
        return time.perf_counter() - started


async def measure_startup(settings: Settings) -> list[Figure]:
    """Measure from exec to the first answer; the first start fills the page cache."""
    samples = [await _first_health_ms() for _ in range(settings.runs + 1)]
    figure = Figure(
        name="exec to first Health", unit="ms", samples=tuple(samples[1:]), target=at_most(200)
    )
    return [figure]


async def _first_health_ms() -> float:
    started = time.perf_counter()
    with started_server() as process:
        await process.wait_until_ready()
        return (time.perf_counter() - started) * 1000.0
