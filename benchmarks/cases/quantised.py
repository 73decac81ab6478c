"""How fast does a batch decode with quantised keys and values, compared to without?"""

from benchmarks.cases.decode import GREEDY, ROWS, Case, ratio, workload_of
from benchmarks.harness.figure import Figure, Settings, at_least
from benchmarks.harness.models import LARGE, SMALL, BenchModel
from benchmarks.harness.served import Served, served
from benchmarks.harness.workload import Speed

CASE = Case("eight streams, kv_bits 8", (GREEDY,) * ROWS, at_least(0.95))
NEW_TOKENS = 64


async def measure(settings: Settings) -> list[Figure]:
    """Measure eight streams; a quick run uses only the small model."""
    models = (SMALL,) if settings.is_quick else (SMALL, LARGE)
    return [await _measure_model(settings, model) for model in models]


async def _measure_model(settings: Settings, model: BenchModel) -> Figure:
    async with served(model) as plain, served(model, "kv_bits:8") as quantised:
        # The first pair warms both up.
        pairs = [await _pair(plain, quantised) for _ in range(settings.runs + 1)][1:]
    return ratio(
        f"{model.name}: {CASE.name}",
        CASE.target,
        [(one.decode, other.decode) for one, other in pairs],
        "unquantised",
    )


async def _pair(plain: Served, quantised: Served) -> tuple[Speed, Speed]:
    workload = await workload_of(plain, CASE, NEW_TOKENS)
    return await plain.run(workload), await quantised.run(workload)
