"""How many tokens do agents compute again when the prompt cache is short of memory?

Traces are replayed on the prompt cache in this process. Computed tokens are compared with a cache
without limit, with a clairvoyant cache of the same bytes, and with an LRU of the same bytes.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.agents.cache_play import (
    UNLIMITED_BYTES,
    FillingNetwork,
    Trace,
    play,
    written_share,
)
from benchmarks.agents.forecasts import Clairvoyant, LeastRecent
from benchmarks.agents.trace import TraceShape
from benchmarks.harness.figure import Figure, Settings, at_most

SHAPES = (
    TraceShape(seed=101, sessions=2),
    TraceShape(seed=102, sessions=3),
    TraceShape(seed=103, sessions=4),
)
# Tokens of KV, or states for a model without KV. 0 is no limit.
BUDGETS = (0, 100_000, 50_000, 30_000)
STATE_BUDGETS = (0, 50, 25, 15)
# In these sizes bytes written to disk are counted too.
BUDGETS_ON_DISK = (50_000, 25)
UNIT = "x computed without limit"
MOST_WITH_ROOM = 1.02
MOST_OF_CLAIRVOYANT = 1.15
MOST_WRITTEN = 1.2

# Layers by kind and width: keys and values of a position take 4 bytes a unit of width, a state 2.
FAMILIES: Mapping[str, Sequence[tuple[str, int]]] = {
    "full attention": [("kv", 4)],
    "windows of 1,024": [("kv", 4), *[("window 1024", 4)] * 5],
    "windows of 128": [("kv", 4), ("window 128", 4)],
    "hybrid, a state of 2,000 tokens": [("kv", 4), ("state", 16_000)],
    "hybrid, a state of 20 tokens": [("kv", 4), ("state", 160)],
    "recurrent": [("state", 16_000)],
}
QUICK_FAMILIES = ("full attention", "hybrid, a state of 20 tokens")


async def measure(settings: Settings) -> list[Figure]:
    """Replay every trace on every family in every size."""
    families = QUICK_FAMILIES if settings.is_quick else tuple(FAMILIES)
    traces = [Trace.of(shape) for shape in (SHAPES[:1] if settings.is_quick else SHAPES)]
    return [
        figure
        for family in families
        for budget in (STATE_BUDGETS if family == "recurrent" else BUDGETS)
        for figure in _figures(family, traces, budget)
    ]


def _figures(family: str, traces: Sequence[Trace], budget: int) -> Iterator[Figure]:
    network = FillingNetwork(FAMILIES[family])
    nbytes = network.bytes_of(budget) or UNLIMITED_BYTES
    name = f"agents, {family}, " + (f"room for {budget:,}" if budget else "no limit")
    ours = [play(trace, network, nbytes) for trace in traces]
    bound, context = MOST_WITH_ROOM, dict[str, float]()
    if budget:
        context = _others(ours, traces, network, nbytes)
        bound = MOST_OF_CLAIRVOYANT * context["clairvoyant"]
    samples = _over_least(ours, traces)
    yield Figure(name=name, unit=UNIT, samples=samples, target=at_most(bound), context=context)
    if budget not in BUDGETS_ON_DISK:
        return
    shares = tuple(_written(trace, network, nbytes) for trace in traces)
    disk = f"{name}, on disk"
    yield Figure(name=disk, unit="x unique bytes", samples=shares, target=at_most(MOST_WRITTEN))


def _others(
    ours: Sequence[Sequence[int]], traces: Sequence[Trace], network: FillingNetwork, nbytes: int
) -> dict[str, float]:
    """Return the results of other policies with the same bytes."""
    best = [play(trace, network, nbytes, _clairvoyant(trace, network)) for trace in traces]
    recent = [play(trace, network, nbytes, LeastRecent()) for trace in traces]
    pairs = [pair for each in zip(ours, best, strict=True) for pair in zip(*each, strict=True)]
    losses = [sum(one) > sum(other) for one, other in zip(ours, recent, strict=True)]
    return {
        "clairvoyant": median(_over_least(best, traces)),
        "LRU": median(_over_least(recent, traces)),
        "traces worse than LRU": sum(losses),
        "tokens of the worst request": max(one - other for one, other in pairs),
    }


def _clairvoyant(trace: Trace, network: FillingNetwork) -> Clairvoyant:
    return Clairvoyant(trace.prompts, has_snapshots=network.has_states)


def _over_least(computed: Sequence[Sequence[int]], traces: Sequence[Trace]) -> tuple[float, ...]:
    pairs = zip(computed, traces, strict=True)
    return tuple(sum(tokens) / trace.least for tokens, trace in pairs)


def _written(trace: Trace, network: FillingNetwork, nbytes: int) -> float:
    with tempfile.TemporaryDirectory() as root:
        return written_share(trace, network, nbytes, Path(root))
