"""How often a greedy reply depends on its company: where two tokens are almost equally likely.

Each reply is computed alone, from no stored prefix and without drafts; then again, in other ways.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any

from backend.pb import backend_pb2 as pb
from benchmarks.cases.real import COPY, STORY, TOPICS
from benchmarks.harness.contenders import say
from benchmarks.harness.figure import Figure, Settings
from benchmarks.harness.models import SMOLLM2, SMOLLM2_4BIT, PublishedModel
from benchmarks.harness.served import Served, served

ROWS = 8
NEW_TOKENS, QUICK_TOKENS = 32, 12
# The name of weights, the model, the type that it is loaded with, or its own, and options.
WEIGHTS: Sequence[tuple[str, PublishedModel, str, Sequence[str]]] = (
    ("bf16", SMOLLM2, "bfloat16", ()),
    ("bf16 as float32", SMOLLM2, "", ()),
    ("4 bits as float32", SMOLLM2_4BIT, "", ()),
    ("4 bits, KV of 8 bits", SMOLLM2_4BIT, "", ("kv_bits:8",)),
    ("4 bits, KV of 4 bits", SMOLLM2_4BIT, "", ("kv_bits:4",)),
)
STORED, TOGETHER, DRAFTED = "a stored prefix", "a batch of eight", "drafts"

Token = dict[str, Any]
"""A token with its log-probability, and those of the two likeliest."""
Reply = Sequence[Token]
Way = Callable[[Served, Sequence[pb.PredictOptions]], Awaitable[list[Reply]]]


async def measure(settings: Settings) -> list[Figure]:
    """Compare the replies of every kind of weights."""
    figures = []
    for name, model, dtype, options in WEIGHTS:
        if not model.directory.is_dir():
            say(f"{name}: SKIPPED, run `make real-models` first")
            continue
        async with served(model, *options, dtype=dtype) as server:
            figures += await _compared(name, server, settings)
    return figures


async def _compared(name: str, server: Served, settings: Settings) -> list[Figure]:
    tokens = QUICK_TOKENS if settings.is_quick else NEW_TOKENS
    requests = [_request(prompt, tokens) for prompt in _prompts(settings)]
    expected = await _alone(server, requests)
    ways: dict[str, Way] = {STORED: _alone, TOGETHER: _together, DRAFTED: _drafted}
    figures = []
    for way, ask in ways.items():
        found = await ask(server, requests)
        changes = [_change(*pair) for pair in zip(found, expected, strict=True)]
        gaps = [each for each, _ in changes if each is not None]
        share, gap = 100.0 * len(gaps) / len(changes), max(gaps, default=0.0)
        apart = max(distance for _, distance in changes)
        figures += [
            Figure(name=f"{name}, replies that change: {way}", unit="%", samples=(share,)),
            Figure(name=f"{name}, gap of the tokens: {way}", unit="nats", samples=(gap,)),
            Figure(name=f"{name}, log-probabilities apart: {way}", unit="nats", samples=(apart,)),
        ]
    return figures


def _prompts(settings: Settings) -> list[str]:
    """Return as many stories as lists to copy, for which drafts are written."""
    numbers = count(1)
    topics = TOPICS[: 2 if settings.is_quick else ROWS // 2]
    stories = [STORY.format(next(numbers), topic) for topic in topics]
    return [*stories, *(COPY.format(next(numbers), topic) for topic in topics)]


def _request(prompt: str, tokens: int, *, drafts: bool = False) -> pb.PredictOptions:
    request = pb.PredictOptions(
        UseTokenizerTemplate=True,
        Messages=[pb.Message(role="user", content=prompt)],
        Tokens=tokens,
        IgnoreEOS=True,
        Logprobs=1,
        TopLogprobs=2,
    )
    if not drafts:
        request.Metadata["speculation"] = "off"
    return request


async def _alone(server: Served, requests: Sequence[pb.PredictOptions]) -> list[Reply]:
    return [await server.logprobs(request) for request in requests]


async def _together(server: Served, requests: Sequence[pb.PredictOptions]) -> list[Reply]:
    replies: list[Reply] = []
    for begin in range(0, len(requests), ROWS):
        group = requests[begin : begin + ROWS]
        replies += await asyncio.gather(*map(server.logprobs, group))
    return replies


async def _drafted(server: Served, requests: Sequence[pb.PredictOptions]) -> list[Reply]:
    return await _alone(
        server,
        [_request(each.Messages[0].content, each.Tokens, drafts=True) for each in requests],
    )


def _change(found: Reply, expected: Reply) -> tuple[float | None, float]:
    """Compare a reply with the expected one, up to the first other token.

    Returns:
        The gap between the two likeliest tokens there, or `None` if all are the same; and the
        largest distance of a chosen token's log-probability before it.
    """
    apart = 0.0
    for one, other in zip(found, expected, strict=True):
        if one["token"] != other["token"]:
            first, second = (float(each["logprob"]) for each in other["top_logprobs"])
            return first - second, apart
        apart = max(apart, abs(one["logprob"] - other["logprob"]))
    return None, apart
