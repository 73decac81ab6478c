"""Replays agent traces on the prompt cache in this process.

The caches are of mlx-lm's classes, filled by a network that computes nothing else.
"""

import math
import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import mlx.core as mx

from backend.cache.eviction import Forecast
from backend.cache.kv import Packing, Size
from backend.cache.layers import Growth, growth_of
from backend.cache.layout import trim_windows
from backend.cache.node_files import NodeHeader, read_node
from backend.cache.radix import RadixTree, TokenKey
from backend.config import ModelOptions
from backend.core.model import Reuse
from backend.core.prompt import Message, Prompt
from backend.core.request import GenerationCall, GenerationParams, GenerationRequest
from backend.engine.messages.protocol import DiskNews, Fetched
from backend.engine.prefix_store import DiskSettings, PrefixStore
from backend.engine.rows.row import Row
from backend.model.checkpoint.upstream import import_mlx_lm
from backend.model.loader import load
from backend.pipeline.rendering import render
from backend.pipeline.served_model import ServedModel
from benchmarks.agents.trace import AgentRequest, TraceShape, make_trace
from benchmarks.harness.models import TINY

PARAMS = GenerationParams(request_id="trace")

FINGERPRINT = "0" * 24
UNLIMITED_BYTES = 2**60
FETCH_TIMEOUT_S = 60


class PlayedForecast(Forecast, Protocol):
    """A forecast that knows the number of past requests.

    Attributes:
        now: The number of the present request.
    """

    now: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A request as tokens, with its reply; the caller of a cut one leaves before its end."""

    prompt: Prompt
    reply: tuple[int, ...]
    calls_tools: bool
    is_cut: bool = False


@dataclass(frozen=True)
class Trace:
    """Requests as tokens.

    Attributes:
        waves: Groups of concurrent requests.
    """

    waves: Sequence[Sequence[Turn]]

    @classmethod
    def of(cls, shape: TraceShape) -> Self:
        """Write a trace and render it."""
        directory = TINY["llama"].directory
        options = ModelOptions(model=str(directory))
        plain = load(options, directory)
        card = replace(plain.card, context_length=None, reuse=Reuse.AT_SNAPSHOTS)
        model = ServedModel.of(replace(plain, card=card), options)
        return cls([[_turn(request, model) for request in wave] for wave in make_trace(shape)])

    @property
    def prompts(self) -> list[Sequence[int]]:
        """The prompts of all requests, in order."""
        return [turn.prompt.token_ids for wave in self.waves for turn in wave]

    @cached_property
    def least(self) -> int:
        """The prompt tokens computed with an unlimited cache."""
        texts: list[TokenKey] = []
        total = 0
        for turn in (turn for wave in self.waves for turn in wave):
            prompt = TokenKey.from_ids(turn.prompt.token_ids)
            shared = max((text.common_prefix(prompt) for text in texts), default=0)
            total += len(prompt) - min(shared, len(prompt) - 1)
            texts.append(TokenKey.from_ids((*turn.prompt.token_ids, *turn.reply[:-1])))
        return total


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
        caches = row.own_caches(self.fresh_caches)
        tokens = mx.array([row.token_ids[row.fed : row.fed + count]]).astype(mx.float16)
        for (kind, width), cache in zip(self.layers, caches, strict=True):
            if kind == "state":
                cache[0] = mx.broadcast_to(tokens[:, -1:], (1, width)) + mx.zeros(1, tokens.dtype)
            else:
                filled = mx.broadcast_to(tokens[:, None, :, None], (1, 1, count, width))
                cache.update_and_fetch(filled, filled)
        mx.eval([cache.state for cache in caches])
        row.count_fed(count)

    def growth(self) -> list[Growth]:
        """Return how the caches grow."""
        row = Row(_request("probe", Prompt((0, 1)), 1))
        self.feed(row, 2)
        return [growth_of(cache) for cache in row.cache or ()]

    @property
    def has_states(self) -> bool:
        """Whether prefixes can be resumed only at snapshots."""
        return any(kind == "state" for kind, _ in self.layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of a snapshot."""
        return sum(layer.fixed_bytes for layer in self.growth())

    def bytes_of(self, budget: int) -> int:
        """Return the bytes of `budget` tokens of KV, or of states without KV."""
        per_token = sum(layer.bytes_per_token for layer in self.growth())
        return budget * (per_token or self.state_bytes)


def play(
    trace: Trace, network: FillingNetwork, nbytes: int, forecast: PlayedForecast | None = None
) -> list[int]:
    """Return the prompt tokens computed by each request with a cache of `nbytes`.

    Without a forecast the cache learns its own, as the product does.
    """
    store = _store(network, nbytes, DiskSettings(), forecast)
    computed: list[int] = []
    for wave in trace.waves:
        rows = _served(wave, len(computed), network, store)
        computed += [len(row.request.prompt.token_ids) - row.cached_tokens for row in rows]
        if forecast is not None:
            forecast.now += len(rows)
    return computed


def written_share(trace: Trace, network: FillingNetwork, nbytes: int, root: Path) -> float:
    """Return the ratio of all bytes written to an empty directory to the unique ones.

    The cache has `nbytes` in memory, and is idle between waves.
    """
    fetched: queue.SimpleQueue[Fetched] = queue.SimpleQueue()

    def post(news: DiskNews) -> None:
        if isinstance(news, Fetched):
            fetched.put(news)

    settings = DiskSettings(
        root=root, fingerprint=FINGERPRINT, budget_bytes=UNLIMITED_BYTES, post=post
    )
    store = _store(network, nbytes, settings)
    for number, wave in enumerate(trace.waves):
        _served(wave, number, network, store, fetched)
        store.rest()
    store.close()
    written_bytes = store.metrics()["prompt_cache.disk.written_bytes"]
    return written_bytes / _unique_bytes(root, network.state_bytes)


def _unique_bytes(root: Path, state_bytes: int) -> float:
    """Return the bytes of files without duplicates between them."""
    known: RadixTree[_Nothing] = RadixTree()
    states: dict[bytes, int] = {}
    total = 0.0
    for header, nbytes in sorted(_files(root), key=lambda file: file[0].start):
        if header.has_snapshot:
            states[header.key.packed] = state_bytes
        length = known.match(header.key).length
        if length < len(header.key):
            share = (len(header.key) - length) / (len(header.key) - header.start)
            total += share * (nbytes - state_bytes * header.has_snapshot)
            known.insert(header.key, length, _Nothing())
    return total + sum(states.values())


def _files(root: Path) -> Iterator[tuple[NodeHeader, int]]:
    for path in root.glob("*/*/*.kv"):
        with path.open("rb") as file:
            header, segment = read_node(file, FINGERPRINT)
        yield header, segment.nbytes


class _Nothing:
    def split(self, at: int) -> "tuple[_Nothing, _Nothing]":  # noqa: ARG002 (any place will do)
        return self, self

    def joined(self, other: "_Nothing") -> None:  # noqa: ARG002 (never)
        return None


def _served(
    wave: Sequence[Turn],
    number: int,
    network: FillingNetwork,
    store: PrefixStore,
    fetched: "queue.SimpleQueue[Fetched] | None" = None,
) -> list[Row]:
    rows = [_row(f"{number}.{i}", turn) for i, turn in enumerate(wave)]
    for row in rows:
        _claim(row, store, fetched)
    for row, turn in zip(rows, wave, strict=True):
        _serve(row, turn, network, store)
    for row, turn in zip(rows, wave, strict=True):
        _leave(row, turn, store)
    return rows


def _claim(row: Row, store: PrefixStore, fetched: "queue.SimpleQueue[Fetched] | None") -> None:
    if fetched is not None and store.fetch(row):
        store.take_in(fetched.get(timeout=FETCH_TIMEOUT_S))
    store.claim(row)


def _leave(row: Row, turn: Turn, store: PrefixStore) -> None:
    store.leave(row)
    row.release()
    if turn.calls_tools or turn.is_cut:
        store.expect(row.request_id, is_again=turn.is_cut)


def _row(name: str, turn: Turn) -> Row:
    return Row(_request(name, turn.prompt, len(turn.reply)))


def _store(
    network: FillingNetwork, nbytes: int, disk: DiskSettings, forecast: Forecast | None = None
) -> PrefixStore:
    budget = Size(nbytes, math.inf)
    return PrefixStore(network.fresh_caches, budget, Packing(None), disk, forecast=forecast)


def _serve(row: Row, turn: Turn, network: FillingNetwork, store: PrefixStore) -> None:
    store.restore(row)
    while row.prefill_left:
        network.feed(row, store.room(row))
        store.save(row)
        trim_windows(row.cache or ())
        store.restore(row)
    store.record(row)
    for token_id in turn.reply:
        row.take(token_id)
    network.feed(row, len(turn.reply))


def _request(name: str, prompt: Prompt, max_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        params=GenerationParams(request_id=name), prompt=prompt, room=max_tokens
    )


def _turn(request: AgentRequest, model: ServedModel) -> Turn:
    call = GenerationCall(params=PARAMS, messages=request.messages, tools=request.tools)
    reply = model.tokenizer.encode(_written(request.reply), adds_special=False)
    if request.is_cut:
        reply = reply[: len(reply) // 2 + 1]
    calls_tools = bool(request.reply.tool_calls) and not request.is_cut
    return Turn(render(call, model), tuple(reply), calls_tools, request.is_cut)


def _written(reply: Message) -> str:
    """Return a reply as the tiny models' template writes it in the next prompt."""
    thought = f"<think>\n{reply.reasoning_content}\n</think>\n\n"
    calls = "".join(
        f'\n<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
        for call in reply.tool_calls
    )
    return f"{thought}{reply.content}{calls}<|im_end|>"
