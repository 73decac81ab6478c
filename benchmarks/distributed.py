"""What do several processes cost on one machine? `python -m benchmarks.distributed`.

On the shared cores of one CPU nothing can become faster: the figures show the cost of the links
and of the plan of every step.
"""

import asyncio
import json
import os
import subprocess
import sys

from backend.engine.distributed.topology import local_hosts
from benchmarks.harness.bench_report import machine, print_table
from benchmarks.harness.figure import Figure, Settings, at_most
from benchmarks.harness.models import ROOT, WIDE, ensure_built
from benchmarks.harness.served import served
from benchmarks.harness.workload import Sampling, Workload

SIZES = (1, 2, 4)
PROMPT_TOKENS = 40
NEW_TOKENS = 12
ROWS = 4
SETTINGS = Settings(runs=2, is_quick=False)


async def measure(settings: Settings) -> list[Figure]:
    """Measure tokens through the socket, then the parts of a step."""
    speeds = [await _speed(size, settings.runs) for size in SIZES]
    return speeds + [figure for size in SIZES[1:] for figure in _parts(size, settings.runs)]


async def _speed(size: int, runs: int) -> Figure:
    async with served(WIDE, f"tensor_parallel_size:{size}") as server:
        samples = []
        for run in range(runs + 1):
            prompts = [await server.prompt(PROMPT_TOKENS, ROWS * run + row) for row in range(ROWS)]
            workload = Workload(tuple(prompts), (Sampling(),) * ROWS, NEW_TOKENS)
            samples.append((await server.run(workload)).decode)
    plural = "process" if size == 1 else "processes"
    name = f"{WIDE.name}: {ROWS} streams, {size} {plural}"
    return Figure(name=name, unit="tokens/s", samples=tuple(samples[1:]))


def _parts(size: int, runs: int) -> list[Figure]:
    found = [_ranks(size) for _ in range(runs)]
    context = {name: sorted(each[name] for each in found)[runs // 2] for name in found[0]}
    return [
        Figure(
            name=f"{WIDE.name}: part of a step in collectives, {size} processes",
            unit="%",
            samples=tuple(100.0 * each["collectives_ms"] / each["step_ms"] for each in found),
            context=context,
        ),
        Figure(
            name=f"{WIDE.name}: the plan of a step, {size} processes",
            unit="% of the step",
            samples=tuple(100.0 * each["plan_ms"] / each["step_ms"] for each in found),
            target=at_most(3),
            context=context,
        ),
    ]


def _ranks(size: int) -> dict[str, float]:
    """Return the report of rank 0 of a group without a server."""
    hosts = ",".join(str(host.endpoints[0]) for host in local_hosts(size))
    command = [sys.executable, "-m", "benchmarks.ranks", hosts]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(WIDE.directory)],
            cwd=ROOT,
            env=dict(os.environ),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    told = [rank.communicate()[0] for rank in ranks]
    figures: dict[str, float] = json.loads(told[0].splitlines()[-1])
    return figures


if __name__ == "__main__":
    ensure_built()
    before = machine()
    print_table(asyncio.run(measure(SETTINGS)), ", ".join(before.values()))
