"""A mixture with a part of its experts in memory, next to the same with all of them resident."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from threading import Event, Thread

from benchmarks.cases.decode_speed import GREEDY
from benchmarks.harness.contenders import figures_of, run_in_turn, say
from benchmarks.harness.figure import Figure, Settings, at_least
from benchmarks.harness.models import MIXTURE, ensure_built
from benchmarks.harness.served import Served, served
from benchmarks.harness.workload import Workload

RESIDENT, ALL, HALF, FIFTH = "resident", "all", "a half", "a fifth"
DRAFTLESS, ON_DISK = "speculation:off", "experts:disk"
SHARES = {HALF: 0.5, FIFTH: 0.2}
TASKS = {"one stream": 1, "four streams": 4}
PROMPT_TOKENS, NEW_TOKENS, QUICK_TOKENS = 16, 24, 12
DEFAULT_RUNS = 3
DROP_INTERVAL_S = 0.05
MEGABYTE = 1e6

Samples = dict[str, list[float]]
"""Values of each contender, run by run."""


async def measure(settings: Settings) -> list[Figure]:
    """Measure with the store in no page cache, then in a page cache that holds all of it."""
    if not hasattr(os, "posix_fadvise"):
        say("experts on disk: SKIPPED, this system forgets no page of a file when told to")
        return []
    ensure_built((MIXTURE,))
    figures = []
    async with _contenders() as servers:
        (store,) = MIXTURE.directory.glob("*.store")
        figures += await _like_resident(servers)
        for name, rows in TASKS.items():
            with without_page_cache(store):
                figures += await _task(settings, name, rows, servers)
            figures += await _task(settings, f"{name}, page cache", rows, servers)
    return figures


@asynccontextmanager
async def _contenders() -> AsyncIterator[dict[str, Served]]:
    """Serve the mixture several times; the first load with experts on disk writes the store."""
    async with AsyncExitStack() as stack:

        async def add(name: str, *options: str) -> None:
            server = served(MIXTURE, DRAFTLESS, *options)
            servers[name] = await stack.enter_async_context(server)

        servers: dict[str, Served] = {}
        await add(RESIDENT)
        await add(ALL, ON_DISK)
        (store,) = MIXTURE.directory.glob("*.store")
        for name, share in SHARES.items():
            await add(name, ON_DISK, f"expert_bytes:{int(store.stat().st_size * share)}")
        yield servers


@contextmanager
def without_page_cache(path: Path) -> Iterator[None]:
    """Have the system forget a file again and again, as if other data filled the memory."""
    ended = Event()

    def forget() -> None:
        while not ended.wait(DROP_INTERVAL_S):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    thread = Thread(target=forget)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        os.close(file)


async def _task(
    settings: Settings, name: str, rows: int, servers: Mapping[str, Served]
) -> list[Figure]:
    """Measure tokens/s, their ratio to resident, first tokens, hits, and the rate of reading."""
    speeds: Samples = {who: [] for who in servers}
    firsts: Samples = {who: [] for who in servers}
    hits: Samples = {who: [] for who in servers if who != RESIDENT}
    rates: Samples = {who: [] for who in hits}
    tokens = QUICK_TOKENS if settings.is_quick else NEW_TOKENS
    for run in range(min(settings.runs, DEFAULT_RUNS) + 1):
        prompts = [await servers[RESIDENT].new_prompt(PROMPT_TOKENS) for _ in range(rows)]
        workload = Workload(tuple(prompts), (GREEDY,) * rows, tokens)
        before = {who: await _metrics(servers[who]) for who in hits}
        found = await run_in_turn({who: each.run for who, each in servers.items()}, workload)
        if not run:
            continue  # the first of them fills the memory
        for who, speed in found.items():
            speeds[who].append(speed.decode)
            firsts[who].append(speed.first_s)
        for who in hits:
            after = await _metrics(servers[who])
            used, hit, read, seconds = (after[key] - before[who][key] for key in COUNTED)
            hits[who].append(100 * hit / used)
            rates[who] += [read / seconds / MEGABYTE] if seconds else []
    ratios = {
        who: [a / b for a, b in zip(speeds[who], speeds[RESIDENT], strict=True)] for who in hits
    }
    read = {who: own for who, own in rates.items() if own}
    return [
        *figures_of(name, "tokens/s", speeds),
        *figures_of(f"{name}, to resident", "x", ratios),
        *figures_of(f"{name}, first token", "s", firsts),
        *figures_of(f"{name}, found in memory", "%", hits),
        *figures_of(f"{name}, read while it waits", "MB/s", read),
    ]


COUNTED = ("experts.used", "experts.hits", "experts.read_bytes", "experts.read_s")


async def _metrics(server: Served) -> dict[str, float]:
    """Return the numbers of the engine, as `Inspect` shows them."""
    return {each.name: each.value for each in (await server.inspect()).metrics}


async def _like_resident(servers: Mapping[str, Served]) -> list[Figure]:
    """Compare replies with those of resident experts: alone, together, and after a lost engine."""
    prompts = [await servers[RESIDENT].new_prompt(PROMPT_TOKENS) for _ in range(4)]
    replies = {who: await _replies(server, prompts) for who, server in servers.items()}
    expected = replies.pop(RESIDENT)
    shares = {
        who: [100.0 * (one == other) for one, other in zip(own, expected, strict=True)]
        for who, own in replies.items()
    }
    return [
        Figure(
            name=f"replies like resident ones: {who}",
            unit="%",
            samples=(sum(own) / len(own),),
            target=at_least(100),
        )
        for who, own in shares.items()
    ]


async def _replies(server: Served, prompts: list[str]) -> list[bytes]:
    alone = [await _text(server, prompt) for prompt in prompts]
    together = await asyncio.gather(*(_text(server, prompt) for prompt in prompts))
    losing = asyncio.create_task(_text(server, prompts[0]))
    await server.lose_engine()
    return [*alone, *together, await losing]


async def _text(server: Served, prompt: str) -> bytes:
    return (await server.stream(prompt, NEW_TOKENS, GREEDY)).text
