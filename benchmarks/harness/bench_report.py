"""The report of a run: one table, and the machine of the measurement."""

import datetime
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version

from rich.console import Console
from rich.table import Table

from benchmarks.harness.figure import Figure

PLAIN_WIDTH = 140
# Versions and a date name a measurement: commits of a branch may be rewritten.
PACKAGES = ("mlx-grpc-backend", "mlx", "mlx-lm", "grpcio")


def load() -> str:
    """Return the machine's load average over the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


def gpu_name() -> str:
    """Return the name of a GPU of NVIDIA; empty without one."""
    if not shutil.which("nvidia-smi"):
        return ""
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    asked = subprocess.run(words, capture_output=True, text=True, check=False)
    return asked.stdout.strip() if asked.returncode == 0 else ""


def machine() -> dict[str, str]:
    """Return the properties of this machine that affect figures."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": f"{os.cpu_count()} cores",
        **({"gpu": gpu} if (gpu := gpu_name()) else {}),
        "load": f"load {load()}",
        "python": f"Python {platform.python_version()}",
        **{name: f"{name} {version(name)}" for name in PACKAGES},
    }


def print_table(figures: Sequence[Figure], caption: str) -> None:
    """Print figures, one per line."""
    table = Table(caption=caption)
    table.add_column("figure")
    for heading in ("median", "range", "target"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("details")
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
