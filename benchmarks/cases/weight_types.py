"""How fast is a checkpoint as it is published, in 16 bits or quantised, next to raw mlx-lm?"""

from benchmarks.cases.decode import GREEDY, Case, Subject, measure_case
from benchmarks.harness.baseline import Baseline, environment_of
from benchmarks.harness.figure import Figure, Settings
from benchmarks.harness.models import BFLOAT16, FOUR_BITS
from benchmarks.harness.served import served

# On a CPU, raw mlx-lm takes ten seconds and more for a request.
RUNS = 2
NEW_TOKENS = 16
CASES = (Case("one stream", (GREEDY,)),)


async def measure(settings: Settings) -> list[Figure]:
    """Measure one stream of each type; nothing in a quick run."""
    figures: list[Figure] = []
    for model in () if settings.is_quick else (BFLOAT16, FOUR_BITS):
        subject = Subject(model, NEW_TOKENS, 1, CASES)
        async with served(model) as server:
            with Baseline(model, environment_of(server.process.pid)) as baseline:
                for case in CASES:
                    few = Settings(runs=RUNS, is_quick=False)
                    figures += await measure_case(few, subject, case, server, baseline)
    return figures
