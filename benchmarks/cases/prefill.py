"""What does a long prefill cost others: Health, and a short request queued after it?"""

import asyncio
import time
from statistics import median

from benchmarks.harness.figure import Figure, Settings, at_most
from benchmarks.harness.models import LARGE, SMALL
from benchmarks.harness.served import Served, served
from benchmarks.harness.workload import Sampling

GREEDY = Sampling()
LONG_PROMPTS = 3
PROBE_INTERVAL_S = 0.02
SHORT_TOKENS = 16
HEAD_START_S = 0.2  # until the long prompt is being prefilled

# Whole prompts at once, regardless of waiting requests.
UNCHUNKED = ("prefill_chunk:100000", "prefill_chunk_alone:100000", "prefill_pause_ms:10000000")


async def measure(settings: Settings) -> list[Figure]:
    """Measure both."""
    return [await _health(settings), await _short_behind_long(settings)]


async def _health(settings: Settings) -> Figure:
    model, tokens = (SMALL, 2000) if settings.is_quick else (LARGE, 800)
    longest, typical = [], []
    async with served(model) as server:
        for run in range(settings.runs):
            answers = await _health_answers(server, tokens, run)
            longest.append(max(answers) * 1000.0)
            typical.append(median(answers) * 1000.0)
    return Figure(
        name=f"{model.name}: longest Health, {LONG_PROMPTS} x {tokens} prefilling",
        unit="ms",
        samples=tuple(longest),
        target=at_most(50),
        context={"median Health ms": median(typical)},
    )


async def _health_answers(server: Served, tokens: int, run: int) -> list[float]:
    prompts = [
        await server.prompt(tokens, run * LONG_PROMPTS + prompt) for prompt in range(LONG_PROMPTS)
    ]
    prefills = [asyncio.create_task(server.stream(prompt, 1, GREEDY)) for prompt in prompts]
    answers = []
    while not all(prefill.done() for prefill in prefills):
        answers.append(await server.health_seconds())
        await asyncio.sleep(PROBE_INTERVAL_S)
    await asyncio.gather(*prefills)
    return answers


async def _short_behind_long(settings: Settings) -> Figure:
    model, tokens = (SMALL, 3500) if settings.is_quick else (LARGE, 1500)
    async with served(model) as chunked, served(model, *UNCHUNKED) as unchunked:
        waits = [
            (await _wait_ms(chunked, tokens, run), await _wait_ms(unchunked, tokens, run))
            for run in range(settings.runs + 1)
        ]
    measured = waits[1:]  # the first pair taught both how fast this machine is
    return Figure(
        name=f"{model.name}: first token after {tokens} prefilling",
        unit="x unchunked",
        samples=tuple(ours / other for ours, other in measured),
        context={
            "ms": median(ours for ours, _ in measured),
            "unchunked ms": median(other for _, other in measured),
        },
    )


async def _wait_ms(server: Served, tokens: int, run: int) -> float:
    """Return a short request's time to its first token while a long one prefills."""
    long_prompt = await server.prompt(tokens, 2 * run)
    short_prompt = await server.prompt(SHORT_TOKENS, 2 * run + 1)
    prefill = asyncio.create_task(server.stream(long_prompt, 1, GREEDY))
    await asyncio.sleep(HEAD_START_S)
    started = time.perf_counter()
    row = await server.stream(short_prompt, 1, GREEDY)
    await prefill
    return (row.times[0] - started) * 1000.0
