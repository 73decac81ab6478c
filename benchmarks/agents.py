"""How much do agents compute again when the prompt cache is short of memory?

Traces are played on the prompt cache in this process, with the cache classes of mlx-lm filled by a
network that computes nothing else. Tokens computed are compared with a cache without limit and
with a clairvoyant cache of the same bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from backend.cache.growth import Growth
from backend.cache.layers import growth_of
from backend.cache.packing import Packing
from backend.cache.token_key import TokenKey
from backend.cache.windows import trim_windows
from backend.cache.worth import Forecast
from backend.config import ModelOptions
from backend.core.prompt import Message, Prompt
from backend.core.request import GenerationCall, GenerationRequest, SamplingParams
from backend.engine.prefixes.caching_store import make_prefix_store
from backend.engine.prefixes.disk_link import DiskSettings
from backend.engine.prefixes.store import PrefixStore
from backend.engine.rows.row import Row
from backend.model.checkpoint.upstream import import_mlx_lm
from backend.model.loader import load
from backend.pipeline.prompt.rendering import render
from backend.pipeline.served_model import ServedModel
from benchmarks.agent_trace import AgentRequest, TraceShape, make_trace
from benchmarks.clairvoyant import Clairvoyant
from benchmarks.figure import Figure, Settings, at_most
from benchmarks.models import TINY

SEEDS = (101, 102)
# Tokens of KV; for a model without, states.
BUDGETS = (100_000, 50_000, 30_000)
STATE_BUDGETS = (50, 25, 15)

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


@dataclass(frozen=True, slots=True)
class Turn:
    """A request as tokens, with the reply that it gets."""

    prompt: Prompt
    reply: tuple[int, ...]
    calls_tools: bool


@dataclass(frozen=True, slots=True)
class Result:
    """Tokens computed over those of a cache without limit.

    Attributes:
        worst: Tokens that a single request computed more than with the clairvoyant cache.
    """

    ours: float
    clairvoyant: float
    worst: int


class FillingNetwork:
    """Writes its inputs to caches of real classes, and computes nothing else."""

    def __init__(self, layers: Sequence[tuple[str, int]]) -> None:
        self.layers = layers
        import_mlx_lm()

    def fresh_caches(self) -> list[Any]:
        """Return the caches of one sequence."""
        from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

        return [
            KVCache()
            if kind == "kv"
            else ArraysCache(1)
            if kind == "state"
            else RotatingKVCache(int(kind.split()[1]))
            for kind, _ in self.layers
        ]

    def feed(self, row: Row, count: int) -> None:
        """Feed the next tokens of a row."""
        row.cache = self.fresh_caches() if row.cache is None else row.cache
        tokens = mx.array([row.token_ids[row.fed : row.fed + count]]).astype(mx.float16)
        for (kind, width), cache in zip(self.layers, row.cache, strict=True):
            if kind == "state":
                cache[0] = mx.broadcast_to(tokens[:, -1:], (1, width)) + mx.zeros(1)
            else:
                filled = mx.broadcast_to(tokens[:, None, :, None], (1, 1, count, width))
                cache.update_and_fetch(filled, filled)
        mx.eval([cache.state for cache in row.cache])
        row.fed += count

    def growth(self) -> list[Growth]:
        """Return how the caches grow."""
        row = Row(_request("probe", Prompt((0, 1)), 1))
        self.feed(row, 2)
        return [growth_of(cache) for cache in row.cache or ()]


async def measure(settings: Settings) -> list[Figure]:
    """Play every trace on every family in every size."""
    families = QUICK_FAMILIES if settings.is_quick else tuple(FAMILIES)
    seeds = SEEDS[:1] if settings.is_quick else SEEDS
    traces = [_rendered(TraceShape(seed=seed, sessions=2 + i)) for i, seed in enumerate(seeds)]
    return [
        _figure(family, traces, budget)
        for family in families
        for budget in (STATE_BUDGETS if family == "recurrent" else BUDGETS)
    ]


def _figure(family: str, traces: Sequence[list[list[Turn]]], budget: int) -> Figure:
    network = FillingNetwork(FAMILIES[family])
    nbytes = _bytes_of(network, budget)
    results = [_compared(trace, network, nbytes) for trace in traces]
    clairvoyant = sum(result.clairvoyant for result in results) / len(results)
    return Figure(
        name=f"agents, {family}, room for {budget:,}",
        unit="x computed without limit",
        samples=tuple(result.ours for result in results),
        target=at_most(1.15 * clairvoyant),
        context={
            "clairvoyant": clairvoyant,
            "worst request, tokens": max(result.worst for result in results),
        },
    )


def _compared(trace: list[list[Turn]], network: FillingNetwork, nbytes: int) -> Result:
    has_snapshots = any(kind == "state" for kind, _ in network.layers)
    prompts = [turn.prompt.token_ids for wave in trace for turn in wave]
    oracle = Clairvoyant(prompts, has_snapshots=has_snapshots)
    computed, best = _play(trace, network, nbytes), _play(trace, network, nbytes, oracle)
    least = _least(trace)
    worst = max(ours - theirs for ours, theirs in zip(computed, best, strict=True))
    return Result(sum(computed) / least, sum(best) / least, worst)


def _bytes_of(network: FillingNetwork, budget: int) -> int:
    growth = network.growth()
    per_token = sum(layer.bytes_per_token for layer in growth)
    return budget * (per_token or sum(layer.fixed_bytes for layer in growth))


def _rendered(shape: TraceShape) -> list[list[Turn]]:
    directory = TINY["llama"].directory
    options = ModelOptions(model=str(directory))
    plain = load(options, directory).plain()
    card = replace(plain.card, context_length=None, reuses_at_boundaries_only=True)
    model = ServedModel.of(replace(plain, card=card), options)
    return [[_turn(request, model) for request in wave] for wave in make_trace(shape)]


def _turn(request: AgentRequest, model: ServedModel) -> Turn:
    call = GenerationCall(request_id="trace", messages=request.messages, tools=request.tools)
    reply = model.tokenizer.encode(_written(request.reply), adds_special=False)
    if request.is_cut:
        reply = reply[: len(reply) // 2 + 1]
    calls_tools = bool(request.reply.tool_calls) and not request.is_cut
    return Turn(render(call, model), tuple(reply), calls_tools)


def _written(reply: Message) -> str:
    """Return a reply as the template of the tiny models writes it in the next prompt."""
    thought = f"<think>\n{reply.reasoning_content}\n</think>\n\n"
    calls = "".join(
        f'\n<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
        for call in reply.tool_calls
    )
    return f"{thought}{reply.content}{calls}<|im_end|>"


def _play(
    trace: list[list[Turn]],
    network: FillingNetwork,
    nbytes: int,
    forecast: Clairvoyant | None = None,
) -> list[int]:
    """Return the prompt tokens that each request computes."""
    store = _store(network, nbytes, forecast)
    computed: list[int] = []
    for wave in trace:
        rows = [
            Row(_request(f"{len(computed)}.{i}", turn.prompt, len(turn.reply)))
            for i, turn in enumerate(wave)
        ]
        for row in rows:
            store.claim(row)
        for row, turn in zip(rows, wave, strict=True):
            _serve(row, turn, network, store)
        for row, turn in zip(rows, wave, strict=True):
            store.leave(row)
            row.cache = None
            if turn.calls_tools:
                store.expect(row.request_id)
            computed.append(len(turn.prompt.token_ids) - row.cached_tokens)
            if forecast is not None:
                forecast.now += 1
    return computed


def _store(network: FillingNetwork, nbytes: int, forecast: Forecast | None) -> PrefixStore:
    return make_prefix_store(
        network.fresh_caches, nbytes, Packing(None), DiskSettings(), forecast=forecast
    )


def _serve(row: Row, turn: Turn, network: FillingNetwork, store: PrefixStore) -> None:
    store.restore(row)
    while row.prefill_left:
        network.feed(row, store.room(row))
        store.save(row)
        trim_windows(row.cache or ())
        store.restore(row)
    store.record(row)
    row.token_ids += turn.reply
    network.feed(row, len(turn.reply))


def _request(name: str, prompt: Prompt, max_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt=prompt,
        sampling=SamplingParams(),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
    )


def _least(trace: list[list[Turn]]) -> int:
    """Return the prompt tokens that a cache without limit computes."""
    texts: list[TokenKey] = []
    total = 0
    for wave in trace:
        for turn in wave:
            prompt = TokenKey.from_ids(turn.prompt.token_ids)
            shared = max((text.common_prefix(prompt) for text in texts), default=0)
            total += len(prompt) - min(shared, len(prompt) - 1)
            texts.append(TokenKey.from_ids((*turn.prompt.token_ids, *turn.reply[:-1])))
    return total
