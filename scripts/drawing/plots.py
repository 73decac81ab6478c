"""Draws the documentation's plots from reports of `make bench BENCH_FLAGS=--json`.

The reports are stored next to the plots, which show nothing else.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
REPORTS = PICTURES / "plots.json"

_OURS, _THEIRS = "#0072b2", "#e69f00"
_COLOURS = (_OURS, _THEIRS, "#009e73", "#cc79a7")
_WIDTH, _HEIGHT = 7.2, 4.2  # inches

Figures: TypeAlias = Sequence[Mapping[str, Any]]
"""The figures of a report."""

Report: TypeAlias = Mapping[str, Any]
"""The output of one run of the benchmarks."""

Draw: TypeAlias = Callable[["Axes", Figures], None]


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot.

    Attributes:
        benchmark: The benchmark that measures it.
        title: Its title.
        draw: Draws it.
    """

    benchmark: str
    title: str
    draw: Draw


def matched(figures: Figures, pattern: str) -> dict[tuple[str, ...], Mapping[str, Any]]:
    """Return the figures whose whole names match a pattern, by its groups.

    Raises:
        ValueError: There are none.
    """
    found = {m.groups(): each for each in figures if (m := re.fullmatch(pattern, each["name"]))}
    if not found:
        raise ValueError(f"the report has no figure like {pattern}")
    return found


def _lines(axes: "Axes", series: Mapping[str, Mapping[int, float]], *, x: str, y: str) -> None:
    for colour, (label, points) in zip(_COLOURS, series.items(), strict=False):
        axes.plot(list(points), list(points.values()), "o-", color=colour, label=label)
    _label_rows(axes, sorted({place for points in series.values() for place in points}))
    axes.set(xlabel=x, ylabel=y)
    axes.legend(frameon=False)


def draw_streams(axes: "Axes", figures: Figures) -> None:
    """Draw tokens per second by number of streams."""
    found = matched(figures, r"4M: (\d+) streams")
    speeds = {int(rows): figure["context"] for (rows,), figure in found.items()}
    names = {"this backend, through the socket": "tokens/s", "mlx-lm in a process": "raw tokens/s"}
    series = {
        label: {rows: context[name] for rows, context in speeds.items()}
        for label, name in names.items()
    }
    _lines(axes, series, x="streams", y="tokens/s of all")
    axes.set_ylim(bottom=0)


def draw_memory(axes: "Axes", figures: Figures) -> None:
    """Draw the size of the KV caches by number of rows."""
    found = matched(figures, r"4M: memory of (\d+) rows, .*")
    series = {
        "this backend": {int(rows): each["median"] for (rows,), each in found.items()},
        "mlx-lm, padded": {
            int(rows): each["context"]["mlx-lm MB"] for (rows,), each in found.items()
        },
    }
    _lines(axes, series, x="rows: one of 2,000 tokens, the others of 200", y="MB of KV caches")
    axes.set_ylim(bottom=0)


def draw_mixed_lengths(axes: "Axes", figures: Figures) -> None:
    """Draw the time of a step with rows of equal and different length."""
    found = matched(figures, r"(\w+): step of (.+) / BatchGenerator")
    labels = [
        f"{model}\n{mix}".replace(", ", ",\n").replace(" prefix", "\nprefix")
        for model, mix in found
    ]
    sides = {
        "this backend": ("ours ms", -0.2, _OURS),
        "mlx-lm, padded": ("mlx-lm ms", 0.2, _THEIRS),
    }
    for label, (name, aside, colour) in sides.items():
        heights = [figure["context"][name] for figure in found.values()]
        places = [place + aside for place in range(len(found))]
        axes.bar_label(axes.bar(places, heights, 0.4, color=colour, label=label), fmt="%.0f")
    axes.set_xticks(range(len(labels)), labels, fontsize=7)
    axes.set(yscale="log", ylabel="ms of a step")
    axes.legend(frameon=False)


def draw_first_token(axes: "Axes", figures: Figures) -> None:
    """Draw the wait for the first token by the cached part of the prompt."""
    again = matched(figures, r"4M: (\d+) tokens, same prompt")
    tail = matched(figures, r"4M: (\d+) tokens, last 50 new")
    series = {
        "never seen": {int(n): each["context"]["cold ms"] for (n,), each in again.items()},
        "all of it stored": {int(n): each["context"]["ms"] for (n,), each in again.items()},
        "stored but for 50 tokens": {int(n): each["context"]["ms"] for (n,), each in tail.items()},
    }
    _lines(axes, series, x="tokens of the prompt", y="ms to the first token")
    axes.set_yscale("log")


def draw_speculation(axes: "Axes", figures: Figures) -> None:
    """Draw the gain of drafts by number of rows."""
    found = matched(figures, r"4M: (.+), (\d+) rows?")
    # Side by side where their ranges overlap.
    cases = zip(_COLOURS, dict.fromkeys(case for case, _ in found), (0.96, 1.0, 1.04), strict=False)
    for colour, case, aside in cases:
        points = {int(n) * aside: each for (name, n), each in found.items() if name == case}
        _ranges(axes, points, colour=colour, label=case)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    _label_rows(axes, sorted({int(rows) for _, rows in found}))
    axes.set(xlabel="rows", ylabel="tokens/s with drafts over without")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _ranges(
    axes: "Axes", points: Mapping[float, Mapping[str, Any]], *, colour: str, label: str
) -> None:
    """Draw medians, with the lowest and the highest value."""
    medians = [each["median"] for each in points.values()]
    below = [each["median"] - min(each["samples"]) for each in points.values()]
    above = [max(each["samples"]) - each["median"] for each in points.values()]
    style = {"fmt": "o-", "capsize": 3, "color": colour, "label": label}
    axes.errorbar(list(points), medians, [below, above], **style)


def _label_rows(axes: "Axes", places: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.minorticks_off()


PLOTS: Mapping[str, Plot] = {
    "streams": Plot("streams", "Tokens per second by number of streams", draw_streams),
    "mixed-lengths": Plot(
        "ragged", "A step with rows of like and unlike length", draw_mixed_lengths
    ),
    "first-token": Plot("prompt_cache", "First token by stored length", draw_first_token),
    "speculation": Plot("speculation", "What drafts bring", draw_speculation),
    "memory": Plot("streams", "Memory by number of rows", draw_memory),
}


def report_of(reports: Sequence[Report], benchmark: str) -> Report:
    """Return the latest report of a benchmark.

    Raises:
        ValueError: There is none.
    """
    for report in reversed(reports):
        words = report["command"].split()
        if benchmark in words or "--only" not in words:
            return report
    raise ValueError(f"no report is of {benchmark}")


def caption(report: Report, benchmark: str) -> str:
    """Return the conditions of a plot's measurement."""
    machine: Mapping[str, str] = report["machine"]
    mode = " --quick" if "--quick" in report["command"].split() else ""
    facts = ("date", "system", "cores", "load", "load_after", "mlx", "mlx-lm")
    command = f"make bench BENCH_FLAGS='--only {benchmark}{mode}'"
    told = ", ".join(machine[fact] for fact in facts if fact in machine)
    return f"{told}\n4M and 60M are random llamas · {command}"


def draw(reports: Sequence[Report], name: str, directory: Path) -> Path:
    """Draw a plot, a key of `PLOTS`, and return its file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    plot, path = PLOTS[name], directory / f"{name}.svg"
    report = report_of(reports, plot.benchmark)
    # The same report gives the same file, with searchable text.
    with rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained", facecolor="white")
        axes = figure.subplots()
        plot.draw(axes, report["figures"])
        axes.set_title(plot.title, fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        figure.supxlabel(caption(report, plot.benchmark), fontsize=7, color="grey")
        figure.savefig(path, format="svg", metadata={"Date": None})
    return path


@click.command()
@click.argument(
    "paths", type=click.Path(exists=True, dir_okay=False, path_type=Path), nargs=-1, required=True
)
def main(paths: Sequence[Path]) -> None:
    """Draw all plots from the reports PATHS, later ones first, and store them next to the plots."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for name in PLOTS:
        click.echo(draw(reports, name, PICTURES))
    REPORTS.write_text(json.dumps(reports, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
