"""How fast are tokens generated through the socket, next to raw mlx-lm?"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.harness.baseline import Baseline, environment_of
from benchmarks.harness.figure import Figure, Settings, Target, at_least, at_most
from benchmarks.harness.models import LARGE, SMALL, BenchModel
from benchmarks.harness.served import Served, served
from benchmarks.harness.workload import Sampling, Speed, Workload

PROMPT_TOKENS = 90
ROWS = 8
GREEDY = Sampling()
NO_LATER = at_most(1.0)
MIXED = tuple(
    Sampling(
        temperature=0.6 + 0.1 * row,
        top_k=(0, 20, 40, 100)[row % 4],
        top_p=(0.95, 1.0, 0.8)[row % 3],
        min_p=(0.0, 0.05)[row % 2],
    )
    for row in range(ROWS)
)


@dataclass(frozen=True, slots=True)
class Case:
    """Rows with these samplings, and their targets relative to raw mlx-lm, if any.

    Attributes:
        target: Of tokens/s, over raw mlx-lm's.
        first_target: Of the time to the first token, mean of the rows, over raw mlx-lm's.
    """

    name: str
    samplings: tuple[Sampling, ...]
    target: Target | None = None
    first_target: Target | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, the length of its replies, its number of runs, and its cases."""

    model: BenchModel
    new_tokens: int
    run_factor: int
    cases: tuple[Case, ...]


SUBJECTS = (
    Subject(
        SMALL,
        96,
        3,  # its runs are short, and the noise of the machine is long
        (
            Case("one stream", (GREEDY,), at_least(0.95)),
            Case("eight streams, equal", (GREEDY,) * ROWS, at_least(1.0), NO_LATER),
            Case("eight streams, mixed", MIXED, at_least(1.2)),
        ),
    ),
    Subject(
        LARGE,
        64,
        1,
        (
            Case("one stream", (GREEDY,), at_least(0.99)),
            Case("eight streams, equal", (GREEDY,) * ROWS, at_least(1.0), NO_LATER),
            Case("eight streams, mixed", MIXED, at_least(1.2)),
        ),
    ),
)


async def measure(settings: Settings) -> list[Figure]:
    """Measure every case on every model; a quick run uses only the small one."""
    figures = []
    for subject in SUBJECTS[:1] if settings.is_quick else SUBJECTS:
        async with served(subject.model) as server:
            environment = environment_of(server.process.pid)
            with Baseline(subject.model, environment) as baseline:
                for case in subject.cases:
                    figures += await measure_case(settings, subject, case, server, baseline)
    return figures


async def measure_case(
    settings: Settings, subject: Subject, case: Case, server: Served, baseline: Baseline
) -> list[Figure]:
    """Compare the speed of a case through the socket with that of raw mlx-lm, run by run."""
    raw, ours = [], []
    for _ in range(settings.runs * subject.run_factor + 1):
        workload = await workload_of(server, case, subject.new_tokens)
        raw.append(baseline.run(workload))
        ours.append(await server.run(workload))
    raw, ours = raw[1:], ours[1:]  # the first pair warmed both up
    name = f"{subject.model.name}: {case.name}"
    return [*_speeds(name, case.target, raw, ours), _first_tokens(name, case, raw, ours)]


async def workload_of(server: Served, case: Case, new_tokens: int) -> Workload:
    """Create prompts that the server has not seen, so that none profits from an earlier one."""
    prompts = [await server.new_prompt(PROMPT_TOKENS) for _ in case.samplings]
    return Workload(tuple(prompts), case.samplings, new_tokens)


def _speeds(
    name: str, target: Target | None, raw: Sequence[Speed], ours: Sequence[Speed]
) -> list[Figure]:
    whole = [(one.whole, other.whole) for one, other in zip(raw, ours, strict=True)]
    decode = [(one.decode, other.decode) for one, other in zip(raw, ours, strict=True)]
    return [
        ratio(name, target, whole),
        ratio(f"{name}, without prefill", None, decode),
    ]


def _first_tokens(name: str, case: Case, raw: Sequence[Speed], ours: Sequence[Speed]) -> Figure:
    """Compare the rows' times to their first tokens."""
    return Figure(
        name=f"{name}, first tokens",
        unit="x raw ms",
        samples=tuple(other.first_s / one.first_s for one, other in zip(raw, ours, strict=True)),
        target=case.first_target,
        context={
            "raw ms": median(one.first_s for one in raw) * 1000.0,
            "ms": median(one.first_s for one in ours) * 1000.0,
            "raw last ms": median(one.last_first_s for one in raw) * 1000.0,
            "last ms": median(one.last_first_s for one in ours) * 1000.0,
        },
    )


def ratio(
    name: str, target: Target | None, pairs: Sequence[tuple[float, float]], base: str = "raw"
) -> Figure:
    """Compare pairs of tokens/s: the base, and the run next to it."""
    return Figure(
        name=name,
        unit=f"x {base}",
        samples=tuple(ours / one for one, ours in pairs),
        target=target,
        context={
            f"{base} tokens/s": median(one for one, _ in pairs),
            "tokens/s": median(ours for _, ours in pairs),
        },
    )


QUANTISED_CASE = Case("eight streams, kv_bits 8", (GREEDY,) * ROWS, at_least(0.95))
QUANTISED_TOKENS = 64


async def measure_quantised(settings: Settings) -> list[Figure]:
    """Measure eight streams; a quick run uses only the small model."""
    models = (SMALL,) if settings.is_quick else (SMALL, LARGE)
    return [await _measure_quantised(settings, model) for model in models]


async def _measure_quantised(settings: Settings, model: BenchModel) -> Figure:
    async with served(model) as plain, served(model, "kv_bits:8") as quantised:
        # The first pair warms both up.
        pairs = [await _pair(plain, quantised) for _ in range(settings.runs + 1)][1:]
    return ratio(
        f"{model.name}: {QUANTISED_CASE.name}",
        QUANTISED_CASE.target,
        [(one.decode, other.decode) for one, other in pairs],
        "unquantised",
    )


async def _pair(plain: Served, quantised: Served) -> tuple[Speed, Speed]:
    workload = await workload_of(plain, QUANTISED_CASE, QUANTISED_TOKENS)
    return await plain.run(workload), await quantised.run(workload)
