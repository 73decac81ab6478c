"""Run the benchmarks, print one table or JSON. Each figure is a median of interleaved runs."""

import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version

import click
from rich.console import Console
from rich.table import Table

from benchmarks import decode, prefill, prompt_cache, router, startup, storm, structure
from benchmarks.figure import Figure, Settings
from benchmarks.models import ensure_built

FULL = Settings(runs=5, is_quick=False)
QUICK = Settings(runs=3, is_quick=True)
PLAIN_WIDTH = 140

BENCHMARKS: dict[str, Callable[[Settings], Awaitable[list[Figure]]]] = {
    "startup": startup.measure,
    "decode": decode.measure,
    "prefill": prefill.measure,
    "prompt_cache": prompt_cache.measure,
    "storm": storm.measure,
    "structure": structure.measure,
    "router": router.measure,
}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--quick", is_flag=True, help="Measure less: about two minutes.")
@click.option("--only", type=click.Choice(list(BENCHMARKS)), multiple=True, help="Run this one.")
def main(*, as_json: bool, quick: bool, only: tuple[str, ...]) -> None:
    """Measure the backend against raw mlx-lm, on this machine, in this run."""
    ensure_built()
    machine = _machine()  # its load before ours
    started = time.monotonic()
    figures = asyncio.run(_measure(only or tuple(BENCHMARKS), QUICK if quick else FULL))
    seconds = round(time.monotonic() - started)
    if as_json:
        report = {
            "machine": machine,
            "seconds": seconds,
            "figures": [figure.as_json() for figure in figures],
        }
        click.echo(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        _print_table(figures, f"{', '.join(machine.values())}; {seconds} s")


async def _measure(names: Sequence[str], settings: Settings) -> list[Figure]:
    return [figure for name in names for figure in await BENCHMARKS[name](settings)]


def _machine() -> dict[str, str]:
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": f"{os.cpu_count()} cores",
        "load": f"load {os.getloadavg()[0]:.1f}",
        "python": f"Python {platform.python_version()}",
        **{name: f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "grpcio")},
    }


def _print_table(figures: Sequence[Figure], caption: str) -> None:
    table = Table(caption=caption)
    table.add_column("figure")
    for heading in ("median", "range", "target"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("behind it")
    for figure in figures:
        table.add_row(*_cells(figure))
    Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH).print(table)


def _cells(figure: Figure) -> tuple[str, ...]:
    low, high = min(figure.samples), max(figure.samples)
    verdict = {True: "met", False: "[red]missed[/red]", None: ""}[figure.is_met]
    return (
        figure.name,
        f"{_short(figure.median)} {figure.unit}",
        f"{_short(low)} - {_short(high)}",
        f"{figure.target} {verdict}" if figure.target else "",
        ", ".join(f"{name} {_short(value)}" for name, value in figure.context.items()),
    )


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


main()
