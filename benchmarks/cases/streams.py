"""How do speed and memory grow with the number of rows? Next to raw mlx-lm."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cases.decode_speed import GREEDY, Case, Subject, measure_case
from benchmarks.cases.ragged import steps_of
from benchmarks.harness.baseline import Baseline, environment_of
from benchmarks.harness.figure import Figure, Settings
from benchmarks.harness.models import LARGE, SMALL, BenchModel
from benchmarks.harness.served import served

ROWS = (1, 2, 4, 8, 16)
NEW_TOKENS = 64
# One conversation among questions.
LONG, SHORT = 2000, 200
_MB = 1e6


async def measure(settings: Settings) -> list[Figure]:
    """Measure speed, then memory; a quick run uses only the small model."""
    figures = []
    for model in (SMALL,) if settings.is_quick else (SMALL, LARGE):
        figures += await _measure(settings, model)
    return figures


async def _measure(settings: Settings, model: BenchModel) -> list[Figure]:
    cases = tuple(Case(f"{rows} streams", (GREEDY,) * rows) for rows in ROWS)
    subject = Subject(model, NEW_TOKENS, 1, cases)
    figures = []
    async with served(model) as server:
        environment = environment_of(server.process.pid)
        with Baseline(model, environment) as baseline:
            for case in cases:
                figures += await measure_case(settings, subject, case, server, baseline)
    mixes = {str(rows): {"shared": 0, "own": _lengths(rows)} for rows in ROWS}
    answer = steps_of(model, mixes, 1, environment)
    return figures + [_memory(model, rows, answer["mixes"][str(rows)]) for rows in ROWS]


def _lengths(rows: int) -> Sequence[int]:
    return [LONG, *(SHORT,) * (rows - 1)]


def _memory(model: BenchModel, rows: int, sides: Mapping[str, Any]) -> Figure:
    """Report the size of caches that decode together."""
    ours, theirs = (sides[side][0][1] / _MB for side in ("ours", "mlx-lm"))
    return Figure(
        name=f"{model.name}: memory of {rows} rows, one of {LONG} tokens, others of {SHORT}",
        unit="MB",
        samples=(ours,),
        context={"mlx-lm MB": theirs},
    )
