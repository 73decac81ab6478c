"""Run the benchmarks, print one table or JSON. Each figure is a median of interleaved runs."""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import click

from benchmarks.agents import tables as agents
from benchmarks.cases import (
    decode_speed,
    gpu,
    load,
    near_ties,
    offloading,
    prefill,
    ragged,
    real,
    routing_cost,
    speculation,
    storm,
    streams,
    structure,
)
from benchmarks.harness.bench_report import load as machine_load
from benchmarks.harness.bench_report import machine, print_table
from benchmarks.harness.figure import Figure, Settings
from benchmarks.harness.models import ensure_built
from benchmarks.prompt_cache import reuse as prompt_cache

FULL = Settings(runs=5, is_quick=False)
QUICK = Settings(runs=3, is_quick=True)

BENCHMARKS: dict[str, Callable[[Settings], Awaitable[list[Figure]]]] = {
    "startup": load.measure_startup,
    "load": load.measure,
    "decode": decode_speed.measure,
    "streams": streams.measure,
    "prefill": prefill.measure,
    "prompt_cache": prompt_cache.measure,
    "ragged": ragged.measure,
    "quantised": decode_speed.measure_quantised,
    "real": real.measure,
    "gpu": gpu.measure,
    "experts": offloading.measure,
    "ties": near_ties.measure,
    "speculation": speculation.measure,
    "heads": speculation.measure_heads,
    "agents": agents.measure,
    "storm": storm.measure,
    "structure": structure.measure,
    "router": routing_cost.measure,
}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--quick", is_flag=True, help="Measure less: about two minutes.")
@click.option("--only", type=click.Choice(list(BENCHMARKS)), multiple=True, help="Run this one.")
@click.option(
    "--model",
    "directories",
    type=click.Path(exists=True, path_type=Path),
    multiple=True,
    help="Of `load` and `real`: measure this one.",
)
def main(
    *, as_json: bool, quick: bool, only: tuple[str, ...], directories: tuple[Path, ...]
) -> None:
    """Measure the backend against raw mlx-lm, on this machine, in this run."""
    given = {"real", "gpu", "experts", "ties", *(("load",) if directories else ())}
    if set(only or BENCHMARKS) - given:
        ensure_built()
    before = machine()  # its load before ours
    started = time.monotonic()
    settings = replace(QUICK if quick else FULL, directories=directories)
    figures = asyncio.run(_measure(only or tuple(BENCHMARKS), settings))
    seconds = round(time.monotonic() - started)
    if as_json:
        report = {
            "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
            "machine": {**before, "load_after": f"{machine_load()} at the end"},
            "seconds": seconds,
            "figures": [figure.as_json() for figure in figures],
        }
        click.echo(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        print_table(figures, f"{', '.join(before.values())}; {seconds} s")


async def _measure(names: Sequence[str], settings: Settings) -> list[Figure]:
    return [figure for name in names for figure in await BENCHMARKS[name](settings)]


main()
