"""How much sooner does a cached prompt give its first token?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from backend.pb import backend_pb2 as pb
from benchmarks.harness.baseline import answer_of, environment_of
from benchmarks.harness.figure import Figure, Settings, Target, at_least, at_most
from benchmarks.harness.models import LARGE, RECURRENT, SMALL, BenchModel
from benchmarks.harness.served import Served, served
from benchmarks.prompt_cache import stored_prefixes
from benchmarks.prompt_cache.dialogues import chat

TAIL_TOKENS = 50
COLD_TOKENS = 10_000  # a long prompt is computed once, short ones more often
WARM_RUNS = 3
FULL_SIZES, QUICK_SIZES = (1000, 4000, 16_000), (1000, 2000, 4000, 8000)
TARGETS = {16_000: at_least(20)}


@dataclass(frozen=True, slots=True)
class Waits:
    """Milliseconds until the first token.

    Attributes:
        cold: Of a new prompt.
        again: Of the same one, right afterwards.
        new_tail: Of one with another last message.
    """

    cold: float
    again: float
    new_tail: float


async def measure(settings: Settings) -> list[Figure]:
    """Measure times first, then stored bytes."""
    figures = []
    for model in (SMALL if settings.is_quick else LARGE, RECURRENT):
        figures += await _measure(settings, model)
    return figures + await stored_prefixes.measure(settings)


async def _measure(settings: Settings, model: BenchModel) -> list[Figure]:
    sizes = QUICK_SIZES if settings.is_quick else FULL_SIZES
    async with served(model) as server:
        environment = environment_of(server.process.pid)
        await _waits(server, 2 * TAIL_TOKENS, 0)  # warms up
        waits = {tokens: await _repeated_waits(server, tokens, settings.runs) for tokens in sizes}
    longest = max(sizes)
    took_ms = answer_of(
        "benchmarks.prompt_cache.stores",
        {"directory": str(model.directory), "prompt_tokens": longest, "runs": settings.runs},
        environment,
    )
    return [
        *(figure for tokens in sizes for figure in _speedups(model, tokens, waits[tokens])),
        *_rebuilds(f"{model.name}: {longest} tokens found and rebuilt", waits[longest], took_ms),
    ]


async def _repeated_waits(server: Served, tokens: int, runs: int) -> list[Waits]:
    count = max(1, min(runs, COLD_TOKENS // tokens))
    return [wait for run in range(1, count + 1) for wait in await _waits(server, tokens, run)]


async def _waits(server: Served, tokens: int, run: int) -> list[Waits]:
    """Send a new prompt, then the same and a similar one in turn."""
    seed = tokens + 100 * run
    system = pb.Message(role="system", content=await server.prompt(tokens - TAIL_TOKENS, seed))

    async def wait_ms(question: int) -> float:
        text = await server.prompt(TAIL_TOKENS, seed + question)
        return await server.first_token_ms(chat([system, pb.Message(role="user", content=text)]))

    cold = await wait_ms(1)
    return [Waits(cold, await wait_ms(1), await wait_ms(2 + warm)) for warm in range(WARM_RUNS)]


def _speedups(model: BenchModel, tokens: int, waits: Sequence[Waits]) -> list[Figure]:
    def speedup(case: str, warm_ms: Sequence[float]) -> Figure:
        return Figure(
            name=f"{model.name}: {tokens} tokens, {case}",
            unit="x sooner",
            samples=tuple(wait.cold / ms for wait, ms in zip(waits, warm_ms, strict=True)),
            target=TARGETS.get(tokens),
            context={"cold ms": _cold_ms(waits), "ms": median(warm_ms)},
        )

    return [
        speedup("same prompt", [wait.again for wait in waits]),
        speedup(f"last {TAIL_TOKENS} new", [wait.new_tail for wait in waits]),
    ]


def _rebuilds(
    name: str, waits: Sequence[Waits], took_ms: Mapping[str, Sequence[float]]
) -> list[Figure]:
    """Compare both stores with the wait for a cold prompt of that length."""

    def share(case: str, ms: Sequence[float], target: Target | None) -> Figure:
        return Figure(
            name=case,
            unit="% of cold",
            samples=tuple(100.0 * value / _cold_ms(waits) for value in ms),
            target=target,
            context={"ms": median(ms)},
        )

    return [
        share(name, took_ms["ours"], at_most(3)),
        share(f"{name} by LRUPromptCache", took_ms["theirs"], None),
    ]


def _cold_ms(waits: Sequence[Waits]) -> float:
    return median(wait.cold for wait in waits)
