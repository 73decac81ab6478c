"""Those that a case compares: each generates the same workload in its turn."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from statistics import median

from benchmarks.harness.figure import Figure, Target
from benchmarks.harness.workload import Speed, Workload

Run = Callable[[Workload], Awaitable[Speed]]
"""Generates a workload with one of those that are compared."""


def in_thread(run: Callable[[Workload], Speed]) -> Run:
    """Let a contender that blocks run beside the event loop."""
    return lambda workload: asyncio.to_thread(run, workload)


async def run_in_turn(runs: Mapping[str, Run], workload: Workload) -> dict[str, Speed]:
    """Have each generate a workload while the others are idle, and return their speeds."""
    speeds = {}
    for name, run in runs.items():
        speeds[name] = await run(workload)
        rows = len(workload.prompts)
        say(f"{name}: {rows} x {workload.new_tokens} at {speeds[name].whole:.1f} tokens/s")
    return speeds


def figures_of(name: str, unit: str, samples: Mapping[str, Sequence[float]]) -> list[Figure]:
    """Return a figure per contender, `NAME: CONTENDER`, as the grids of pages expect."""
    return [
        Figure(name=f"{name}: {who}", unit=unit, samples=tuple(own)) for who, own in samples.items()
    ]


def ratio_of(
    name: str, ours: str, other: str, target: Target, samples: Mapping[str, Sequence[float]]
) -> Figure:
    """Compare two contenders, run by run; the context has the medians of both."""
    return Figure(
        name=f"{name}: {ours} / {other}",
        unit="x",
        samples=tuple(a / b for a, b in zip(samples[ours], samples[other], strict=True)),
        target=target,
        context={who: median(samples[who]) for who in (ours, other)},
    )


def say(line: str) -> None:
    """Tell the progress of a long measurement."""
    sys.stderr.write(f"{line}\n")
