"""Fills the tables of a page from result files of `make bench`: `report_table docs/PAGE.md`.

A table stands between `<!-- table of FILE: NAME; NAME -->` and `<!-- end -->`. FILE, below `docs`,
has the reports of `python -m benchmarks --json`; a NAME is that of a figure.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(
    r"(?P<head><!-- table of (?P<file>[^:]+): (?P<names>.*?) -->\n).*?(?P<end><!-- end -->)",
    re.DOTALL,
)


def filled(page: str) -> str:
    """Return a page with its tables made anew.

    Raises:
        KeyError: A result file lacks a figure.
    """
    return BLOCK.sub(lambda match: f"{match['head']}\n{_table(match)}\n{match['end']}", page)


def _table(match: re.Match[str]) -> str:
    reports = json.loads((DOCS / match["file"]).read_text(encoding="utf-8"))
    figures = {figure["name"]: figure for report in reports for figure in report["figures"]}
    names = [name.strip() for name in match["names"].split(";")]
    rows = "".join(_row(figures[name]) for name in names)
    return f"{_origin(reports)}\n\n| | median | lowest to highest |\n|---|---|---|\n{rows}"


def _origin(reports: Sequence[dict[str, Any]]) -> str:
    machine, command = reports[0]["machine"], reports[0]["command"]
    place = ", ".join(machine[name] for name in ("system", "cores", "mlx", "mlx-lm"))
    return f"`{command}`, {machine['date']}, {place}, {machine['load']}:"


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
