"""What does a long row cost its short neighbours? Steps of mixed batches, next to mlx-lm's."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from benchmarks.harness.baseline import answer_of, environment_of
from benchmarks.harness.figure import Figure, Settings, Target, at_most
from benchmarks.harness.models import LARGE, SMALL, BenchModel
from benchmarks.harness.served import served

Mix: TypeAlias = dict[str, Any]
"""Positions shared by all rows, and each row's own."""

EQUAL = "eight of 100"
ONE_SHORT, SEVEN_SHORT = "one of 100", "seven of 80 to 110"
LONG, MIXED = "one of 6,000", "seven short, one of 6,000"
ONE_MEDIUM, MEDIUM = "one of 1,000", "fifteen of 1,000"
LONGEST, MIXED_LONGEST = "one of 32,000", "fifteen of 1,000, one of 32,000"
ON_PREFIX, MANY_ON_PREFIX = "eight on a prefix of 6,000", "thirty-two on a prefix of 6,000"
APART = "eight on prefixes of their own, 2,000 each"
EIGHT_SHORT, MANY_SHORT = "eight of 20", "thirty-two of 20"

_SHORT = tuple(range(80, 115, 5))


def _own(*lengths: int, shared: int = 0) -> Mix:
    return {"shared": shared, "own": lengths}


MIXES: Mapping[str, Mix] = {
    EQUAL: _own(*(100,) * 8),
    ONE_SHORT: _own(100),
    SEVEN_SHORT: _own(*_SHORT),
    LONG: _own(6000),
    MIXED: _own(*_SHORT, 6000),
    EIGHT_SHORT: _own(*(20,) * 8),
    ON_PREFIX: _own(*(20,) * 8, shared=6000),
    MANY_SHORT: _own(*(20,) * 32),
    MANY_ON_PREFIX: _own(*(20,) * 32, shared=6000),
    APART: {**_own(*(20,) * 8, shared=2000), "is_apart": True},
}
LONG_MIXES: Mapping[str, Mix] = {
    ONE_MEDIUM: _own(1000),
    MEDIUM: _own(*(1000,) * 15),
    LONGEST: _own(32_000),
    MIXED_LONGEST: _own(*(1000,) * 15, 32_000),
}
SIDES = ("ours", "mlx-lm")
# Generated tokens of each row when its bytes are read.
GENERATED = 16


AT_MOST_THE_SUM = at_most(1.15)
AT_MOST_ONE_PREFIX = at_most(1.3)
AS_FAST_AS_PADDED = at_most(1.0)
TIGHT = at_most(1.1)

# Per run, the milliseconds of a step and the bytes of the caches.
Runs: TypeAlias = Sequence[Sequence[float]]

# A mix, and the batches whose steps add up to its step: short rows, a long one, minus a short one.
SUMS = (
    (AT_MOST_THE_SUM, MIXED, SEVEN_SHORT, LONG, ONE_SHORT),
    (AT_MOST_THE_SUM, MIXED_LONGEST, MEDIUM, LONGEST, ONE_MEDIUM),
    (AT_MOST_ONE_PREFIX, ON_PREFIX, EIGHT_SHORT, LONG, ONE_SHORT),
    (AT_MOST_ONE_PREFIX, MANY_ON_PREFIX, MANY_SHORT, LONG, ONE_SHORT),
)


async def measure(settings: Settings) -> list[Figure]:
    """Measure every mix on the small model and on the large one."""
    mixes = MIXES if settings.is_quick else {**MIXES, **LONG_MIXES}
    figures = []
    for model in (SMALL, LARGE):
        async with served(model) as server:
            environment = environment_of(server.process.pid)
        figures += _figures(model, mixes, steps_of(model, mixes, settings.runs, environment))
    return figures


def steps_of(
    model: BenchModel, mixes: Mapping[str, Mix], runs: int, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return `bytes_per_token`, and the times of each run by mix and side."""
    found: dict[str, Any] = {"mixes": {name: {side: [] for side in SIDES} for name in mixes}}
    for side in SIDES * runs:
        question = {"directory": str(model.directory), "mixes": mixes, "side": side}
        answer = answer_of("benchmarks.cases.ragged_steps", question, environment)
        found["bytes_per_token"] = answer["bytes_per_token"]
        for name, measured in answer["mixes"].items():
            found["mixes"][name][side].append(measured)
    return found


def _figures(
    model: BenchModel, mixes: Mapping[str, Mix], answer: Mapping[str, Any]
) -> list[Figure]:
    runs: Mapping[str, Mapping[str, Runs]] = answer["mixes"]
    figures = [
        _against_padded(model, name, runs[name]) for name in (EQUAL, MIXED, ON_PREFIX, APART)
    ]
    figures += [_against_sum(model, runs, *sums) for sums in SUMS if sums[1] in runs]
    return figures + [
        _tightness(model, name, mixes[name], runs[name]["ours"], answer["bytes_per_token"])
        for name in (EQUAL, MIXED, MIXED_LONGEST, ON_PREFIX, MANY_ON_PREFIX)
        if name in runs
    ]


def _against_padded(model: BenchModel, name: str, sides: Mapping[str, Runs]) -> Figure:
    """Compare a step with that of `BatchGenerator`."""
    ours, theirs = ([step_ms for step_ms, _ in sides[side]] for side in ("ours", "mlx-lm"))
    return _ratio(
        f"{model.name}: step of {name} / BatchGenerator",
        ours,
        theirs,
        AS_FAST_AS_PADDED,
        {"ours ms": statistics.median(ours), "mlx-lm ms": statistics.median(theirs)},
    )


def _against_sum(
    model: BenchModel,
    runs: Mapping[str, Mapping[str, Runs]],
    target: Target,
    mixed: str,
    *parts: str,
) -> Figure:
    """Compare a step of short rows and a long one with the steps of each alone."""
    mixed_ms, *part_ms = ([step for step, _ in runs[name]["ours"]] for name in (mixed, *parts))
    sums = [short + long - one for short, long, one in zip(*part_ms, strict=True)]
    medians = zip(
        ("mixed ms", "short ms", "long ms", "one short ms"), (mixed_ms, *part_ms), strict=True
    )
    return _ratio(
        f"{model.name}: step of {mixed} / sum of its parts",
        mixed_ms,
        sums,
        target,
        {name: statistics.median(values) for name, values in medians},
    )


def _tightness(model: BenchModel, name: str, mix: Mix, runs: Runs, bytes_per_token: int) -> Figure:
    unique = bytes_per_token * (mix["shared"] + sum(mix["own"]) + len(mix["own"]) * GENERATED)
    return Figure(
        name=f"{model.name}: bytes of KV / bytes of tokens, {name}",
        unit="x",
        samples=tuple(nbytes / unique for _, nbytes in runs),
        target=TIGHT,
    )


def _ratio(
    name: str,
    values: Sequence[float],
    bases: Sequence[float],
    target: Target,
    context: Mapping[str, float],
) -> Figure:
    samples = tuple(value / base for value, base in zip(values, bases, strict=True))
    return Figure(name=name, unit="x", samples=samples, target=target, context=context)
