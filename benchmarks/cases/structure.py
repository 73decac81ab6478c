"""What does a constrained reply cost: a schema, a grammar, a tool call?"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import median

from benchmarks.cases.demands import Demand, Reply, request
from benchmarks.harness.baseline import answer_of, environment_of
from benchmarks.harness.figure import Figure, Settings, Target, at_least
from benchmarks.harness.models import WIDE, WIDEST, BenchModel
from benchmarks.harness.served import Served, served

QUESTION_TOKENS = 20
RUN_FACTOR = 1.5  # its runs are short, and the effect is smaller than the noise
FIRST_UNUSED_VARIANT = 100
TARGET = at_least(0.95)

# One value per run of each constraint, and of none.
Measured = Mapping[Demand | None, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Case:
    """Concurrent rows, and the length of their replies; each has its own grammar."""

    name: str
    rows: int
    new_tokens: int


CASES = (Case("one row", 1, 40), Case("eight rows", 8, 32))


async def measure(settings: Settings) -> list[Figure]:
    """Measure with both vocabularies; a quick run uses only the small one."""
    models = (WIDE,) if settings.is_quick else (WIDE, WIDEST)
    return [figure for model in models for figure in await _measure(settings, model)]


async def _measure(settings: Settings, model: BenchModel) -> list[Figure]:
    figures = []
    runs = int(settings.runs * RUN_FACTOR)
    async with served(model) as server:
        environment = environment_of(server.process.pid)
        for case in CASES:
            speeds = await _speeds(server, case, runs)
            figures += _ratios(f"{model.name}: {case.name}", "x free", speeds, TARGET)
        waits = await _waits(server, runs)
        figures += _ratios(f"{model.name}: first token", "x the wait", waits, None)
    question = {"directory": str(model.directory), "runs": settings.runs}
    took = answer_of("benchmarks.cases.compilation", question, environment)
    return figures + [
        Figure(name=f"{model.name}: {name}", unit="ms", samples=tuple(ms))
        for name, ms in took.items()
    ]


async def _speeds(server: Served, case: Case, runs: int) -> Measured:
    """Return tokens per second while all rows generate, with cached prompts."""
    questions = [await server.prompt(QUESTION_TOKENS, row) for row in range(case.rows)]

    async def tokens_per_s(run: int, demand: Demand | None) -> float:
        requests = [
            request(question, Reply(row, case.new_tokens, seed=run + 1), demand)
            for row, question in enumerate(questions)
        ]
        return (await server.send_together(requests)).decode

    return await _in_turn(tokens_per_s, runs)


async def _waits(server: Served, runs: int) -> Measured:
    """Return milliseconds until the first token, with new prompts and grammars."""
    question = await server.prompt(QUESTION_TOKENS, 0)
    variants = count(FIRST_UNUSED_VARIANT)

    async def wait_ms(run: int, demand: Demand | None) -> float:
        reply = Reply(next(variants), new_tokens=1, seed=run + 1)
        return await server.first_token_ms(request(question, reply, demand))

    return await _in_turn(wait_ms, runs)


async def _in_turn(sample: Callable[[int, Demand | None], Awaitable[float]], runs: int) -> Measured:
    """Sample every constraint in every run, back and forth."""
    order: list[Demand | None] = [None, *Demand]
    samples: dict[Demand | None, list[float]] = {demand: [] for demand in order}
    for run in range(runs + 1):
        for demand in order:
            value = await sample(run, demand)
            if run:  # the first one warms up
                samples[demand].append(value)
        order.reverse()
    return samples


def _ratios(name: str, unit: str, measured: Measured, target: Target | None) -> list[Figure]:
    free = measured[None]
    return [
        Figure(
            name=f"{name}, {demand}",
            unit=unit,
            samples=tuple(a / b for a, b in zip(measured[demand], free, strict=True)),
            target=target,
            context={"free": median(free), "with": median(measured[demand])},
        )
        for demand in Demand
    ]
