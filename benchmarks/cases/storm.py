"""What does a burst of embeddings cost concurrent streams?"""

import asyncio
from statistics import median

from benchmarks.harness.figure import Figure, Settings, at_least
from benchmarks.harness.models import LARGE, SMALL, BenchModel
from benchmarks.harness.served import Served, served
from benchmarks.harness.workload import Sampling, Speed, Workload

STREAMS = 4
LOOPS = 16
PROMPT_TOKENS = 40
TEXT_TOKENS = 30
WARM_UP_S = 1.0  # until the loops run, and the size of a piece is known
# Replies that take a few seconds with any model.
SUBJECTS = ((SMALL, 768), (LARGE, 96))


async def measure(settings: Settings) -> list[Figure]:
    """Measure every model; a quick run uses only the small one."""
    subjects = SUBJECTS[:1] if settings.is_quick else SUBJECTS
    return [await _measure(settings, *subject) for subject in subjects]


async def _measure(settings: Settings, model: BenchModel, new_tokens: int) -> Figure:
    calm, storm, rates = [], [], []
    async with served(model) as server:
        for run in range(settings.runs + 1):
            calm.append(await server.run(await _workload(server, new_tokens, 2 * run)))
            workload = await _workload(server, new_tokens, 2 * run + 1)
            speed, embeddings_per_s = await _in_a_storm(server, workload)
            storm.append(speed)
            rates.append(embeddings_per_s)
    # The first pair warms both up.
    pairs = list(zip(calm[1:], storm[1:], strict=True))
    return Figure(
        name=f"{model.name}: {STREAMS} streams with {LOOPS} embedding loops",
        unit="x calm",
        samples=tuple(beside.decode / alone.decode for alone, beside in pairs),
        target=at_least(0.9),
        context={
            "calm tokens/s": median(alone.decode for alone, _ in pairs),
            "tokens/s": median(beside.decode for _, beside in pairs),
            "embeddings/s": median(rates[1:]),
        },
    )


async def _workload(server: Served, new_tokens: int, run: int) -> Workload:
    """Create prompts that no run has used, so that none profits from an earlier one."""
    prompts = [await server.prompt(PROMPT_TOKENS, run * STREAMS + row) for row in range(STREAMS)]
    return Workload(tuple(prompts), (Sampling(),) * STREAMS, new_tokens)


async def _in_a_storm(server: Served, workload: Workload) -> tuple[Speed, float]:
    """Return the speed of the streams, and the embeddings per second."""
    text = await server.prompt(TEXT_TOKENS, seed=0)
    done = 0

    async def embed_on_and_on() -> None:
        nonlocal done
        while True:
            await server.embed(text)
            done += 1

    loops = [asyncio.create_task(embed_on_and_on()) for _ in range(LOOPS)]
    try:
        await asyncio.sleep(WARM_UP_S)
        started, done_before = asyncio.get_running_loop().time(), done
        speed = await server.run(workload)
        seconds = asyncio.get_running_loop().time() - started
        return speed, (done - done_before) / seconds
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
