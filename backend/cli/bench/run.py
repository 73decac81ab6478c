"""Loads a backend with streams, and times each reply."""

import asyncio
import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from random import SystemRandom

from backend.cli.bench.figures import Stream
from backend.cli.client import BackendClient, CallError
from backend.pb import backend_pb2 as pb

# The request before the first round: its prompt gives the number of tokens per word.
_SAMPLE_WORDS = 64
_SYLLABLES = tuple(first + last for first in "bdfgklmnprst" for last in "aeiou")
_SYLLABLES_OF_A_WORD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests of a measurement.

    Attributes:
        streams: Requests that start together.
        prompt_tokens: Per request, approximately.
        tokens: Per reply.
        rounds: Number of rounds, one after another.
    """

    streams: int
    prompt_tokens: int
    tokens: int
    rounds: int


async def measure(client: BackendClient, load: Load) -> list[Sequence[Stream]]:
    """Return the streams of each round.

    A warm-up request is not counted.

    Raises:
        CallError: The backend refuses a request, or one fails.
    """
    sample = await _timed(client, _request(_SAMPLE_WORDS, load.tokens))
    words = max(round(load.prompt_tokens * _SAMPLE_WORDS / max(sample.prompt_tokens, 1)), 1)
    return [await _round(client, load, words) for _ in range(load.rounds)]


async def _round(client: BackendClient, load: Load, words: int) -> Sequence[Stream]:
    requests = [_request(words, load.tokens) for _ in range(load.streams)]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_timed(client, request)) for request in requests]
    except ExceptionGroup as errors:
        # Raised from `except*`, it would stay in a group on Python 3.11.2.
        raise (errors.subgroup(CallError) or errors).exceptions[0] from None
    return [task.result() for task in tasks]


async def _timed(client: BackendClient, request: pb.PredictOptions) -> Stream:
    """Return the tokens of a reply with their arrival times."""
    begun = time.perf_counter()
    arrivals, prompt_tokens = [], 0
    async with aclosing(client.stream(request)) as increments:
        async for increment in increments:
            arrivals.append((time.perf_counter(), increment.usage.completion_tokens))
            prompt_tokens = increment.usage.prompt_tokens
    if not arrivals or arrivals[-1][1] == 0:
        raise CallError("a reply came without a token")
    return Stream(begun, prompt_tokens, tuple(each for each in arrivals if each[1]))


def _request(words: int, tokens: int) -> pb.PredictOptions:
    """Return a request without a shared prefix, which stores nothing in the prompt cache."""
    return pb.PredictOptions(
        Prompt=" ".join(_word() for _ in range(words)),
        Tokens=tokens,
        IgnoreEOS=True,
        PromptCacheRO=True,
        Metadata={"cache_scope": f"bench {uuid.uuid4().hex}", "speculation": "off"},
    )


def _word() -> str:
    return "".join(SystemRandom().choices(_SYLLABLES, k=_SYLLABLES_OF_A_WORD))
