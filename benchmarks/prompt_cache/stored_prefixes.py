"""How much does the prompt cache store and reuse of conversations?"""

import json
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from backend.pb import backend_pb2 as pb
from benchmarks.harness.baseline import answer_of, environment_of
from benchmarks.harness.figure import Figure, Settings, at_least, at_most
from benchmarks.harness.models import LARGE, RECURRENT, SMALL, TINY, BenchModel
from benchmarks.harness.served import Served, served
from benchmarks.prompt_cache.dialogues import (
    REPLY_TOKENS,
    AgentShape,
    agent_turns,
    branching_turns,
    chat,
    shared_tokens,
    unique_tokens,
)

HYBRID = TINY["granitemoehybrid"]
QUICK_FAMILIES = ("llama", "gemma3_text", "qwen3_next", "mamba2")


async def measure(settings: Settings) -> list[Figure]:
    """Measure reuse, then memory."""
    agents = [await _agent_bytes(model) for model in (SMALL, HYBRID, RECURRENT)]
    return [
        await _smallest_reuse(QUICK_FAMILIES if settings.is_quick else tuple(TINY)),
        *agents,
        await _branching_bytes(SMALL if settings.is_quick else LARGE),
    ]


async def _smallest_reuse(families: Sequence[str]) -> Figure:
    """Compare the reuse of each turn of an agent with its common prefix with the previous one."""
    shares = {}
    async with served(TINY[families[0]]) as server:
        for family in families:
            await server.load(TINY[family])
            shares[family] = await _agent_reuse(server)
    worst = min(shares, key=shares.__getitem__)
    return Figure(
        name=f"reused by an agent, worst of {len(families)} families",
        unit="x reusable",
        samples=(shares[worst],),
        target=at_least(0.95),
        context={worst: shares[worst], "median family": median(shares.values())},
    )


async def _agent_reuse(server: Served) -> float:
    """Return the smallest share over the turns."""
    shares: list[float] = []
    requests = await agent_turns(server, AgentShape())
    prompts = [await server.token_ids(request) for request in requests]
    await server.send(requests[0])
    for request, (before, prompt) in zip(requests[1:], pairwise(prompts), strict=True):
        reused = (await server.prompt_cache())["hit_tokens"]
        await server.send(request)
        reused = (await server.prompt_cache())["hit_tokens"] - reused
        shares.append(reused / shared_tokens(before, prompt))
    return min(shares)


async def _agent_bytes(model: BenchModel) -> Figure:
    """Compare the bytes stored after an agent's conversation, here and in mlx-lm's server."""
    async with served(model) as server:
        environment = environment_of(server.process.pid)
        requests = await agent_turns(server, AgentShape())
        prompts = [await server.token_ids(request) for request in requests]
        system_tokens = await _system_tokens(server, requests[0], prompts[0])
        for request in requests:
            await server.send(request)
        books = await server.prompt_cache()
    theirs = _held_upstream(model, prompts, system_tokens, environment)
    tokens = unique_tokens(prompts) + len(prompts) * REPLY_TOKENS
    return Figure(
        name=f"{model.name}: stored after an agent's turns",
        unit="x LRUPromptCache",
        samples=(books["bytes"] / theirs["stored_bytes"],),
        context={
            "bytes/token": books["bytes"] / tokens,
            "there": theirs["stored_bytes"] / tokens,
            "reused": books["hit_tokens"] / sum(map(len, prompts)),
            "reused there": sum(theirs["reused_tokens"]) / sum(map(len, prompts)),
        },
    )


async def _system_tokens(server: Served, request: pb.PredictOptions, prompt: Sequence[int]) -> int:
    """Return the end of the system prompt in mlx-lm's server: before an empty user message."""
    bare = chat([request.Messages[0], pb.Message(role="user")], tools=request.Tools)
    return shared_tokens(await server.token_ids(bare), prompt)


def _held_upstream(
    model: BenchModel,
    prompts: Sequence[list[int]],
    system_tokens: int,
    environment: dict[str, str],
) -> dict[str, Any]:
    first, *others = prompts
    # Its server splits a prompt only if a user spoke last.
    segments = [[first[:system_tokens], first[system_tokens:]], *([prompt] for prompt in others)]
    turns = [{"segments": cut, "new_tokens": REPLY_TOKENS} for cut in segments]
    question = {"directory": str(model.directory), "turns": turns}
    return answer_of("benchmarks.raw_upstream", question, environment)


async def _branching_bytes(model: BenchModel) -> Figure:
    """Compare the stored bytes with those of each token stored once."""
    async with served(model) as server:
        requests = await branching_turns(server, openings=5, endings=2)
        prompts = [await server.token_ids(request) for request in requests]
        for request in requests:
            await server.send(request)
        books = await server.prompt_cache()
        memory = await server.memory()
    # The last token of a reply is never computed.
    replies = len(set(map(tuple, prompts))) * (REPLY_TOKENS - 1)
    needed = (unique_tokens(prompts) + replies) * _token_bytes(model)
    return Figure(
        name=f"{model.name}: stored after ten branching conversations",
        unit="x unique",
        samples=(books["bytes"] / needed,),
        target=at_most(1.1),
        context={
            "tokens": books["tokens"],
            "nodes": books["nodes"],
            "memory without weights": (memory["mlx_active"] - memory["weights"]) / needed,
        },
    )


def _token_bytes(model: BenchModel) -> int:
    """Return the bytes of one token's keys and values in a float32 llama."""
    shape = json.loads((model.directory / "config.json").read_text(encoding="utf-8"))
    values = shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    return int(2 * 4 * values)
