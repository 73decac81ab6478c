"""Fills the tables of a page from result files of `make bench`: `report_table docs/PAGE.md`.

A table stands between `<!-- table of FILE: NAME; NAME -->` and `<!-- end -->`. FILE, below `docs`,
has the reports of `python -m benchmarks --json`; a NAME is that of a figure. `<!-- grid of FILE:
ROW; ROW | COLUMN; COLUMN -->` starts one whose cells are medians of the figures `ROW: COLUMN`.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(
    r"(?P<head><!-- (?P<kind>table|grid) of (?P<file>[^:]+): (?P<names>.*?) -->\n)"
    r".*?(?P<end><!-- end -->)",
    re.DOTALL,
)


Figures: TypeAlias = Mapping[str, Any]
"""The figures of a result file, by name."""


def filled(page: str) -> str:
    """Return a page with its tables made anew.

    Raises:
        KeyError: A result file lacks a figure.
        ValueError: It lacks all of a row, or they have several units.
    """
    return BLOCK.sub(lambda match: f"{match['head']}\n{_table(match)}\n{match['end']}", page)


def _table(match: re.Match[str]) -> str:
    reports = json.loads((DOCS / match["file"]).read_text(encoding="utf-8"))
    make = _list if match["kind"] == "table" else _grid
    figures = {figure["name"]: figure for report in reports for figure in report["figures"]}
    return f"{_origin(reports)}\n\n{make(figures, match['names'])}"


def _list(figures: Figures, names: str) -> str:
    rows = "".join(_row(figures[name]) for name in _parts(names))
    return f"| | median | lowest to highest |\n|---|---|---|\n{rows}"


def _grid(figures: Figures, names: str) -> str:
    """Return a table with a dash where nothing was measured; each row has figures of one unit."""
    rows, columns = map(_parts, names.split("|"))
    head = f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}\n"
    return head + "".join(_grid_row(figures, row, columns) for row in rows)


def _grid_row(figures: Figures, row: str, columns: Sequence[str]) -> str:
    found = [figures.get(f"{row}: {column}") for column in columns]
    (unit,) = {figure["unit"] for figure in found if figure}
    cells = (f"{figure['median']:.3g}" if figure else "–" for figure in found)
    return f"| {row}, {unit} | {' | '.join(cells)} |\n"


def _parts(names: str) -> list[str]:
    return [name.strip() for name in names.split(";")]


def _origin(reports: Sequence[dict[str, Any]]) -> str:
    """Return commands, and the machine before the first of them."""
    machine = reports[0]["machine"]
    commands = " and ".join(f"`{report['command']}`" for report in reports)
    names = ("system", "cores", "gpu", "mlx", "mlx-lm", "load")
    place = ", ".join(machine[name] for name in names if machine.get(name))
    return f"{commands}, {machine['date']}, {place}:"


def _row(figure: dict[str, Any]) -> str:
    lowest, highest = min(figure["samples"]), max(figure["samples"])
    unit = figure["unit"]
    return f"| {figure['name']} | {figure['median']:.3g} {unit} | {lowest:.3g} to {highest:.3g} |\n"


def main() -> None:
    """Fill the pages of the command line."""
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
