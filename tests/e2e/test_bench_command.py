"""The command `bench` over the socket, on a real engine."""

import asyncio
import json

import pytest
from click.testing import CliRunner
from serving import served
from waiting import until

from backend.cli.app import main

pytestmark = pytest.mark.mlx

STREAMS, ROUNDS, TOKENS = 3, 2, 8


async def test_streams_of_the_asked_length_are_measured_and_leave_nothing_behind(tiny_models):
    async with served(tiny_models("llama")) as backend:
        options = ["--streams", str(STREAMS), "--rounds", str(ROUNDS), "--tokens", str(TOKENS)]
        command = ["bench", "--addr", backend.address, *options, "--prompt-tokens", "100", "--json"]
        result = await asyncio.to_thread(CliRunner().invoke, main, command)
        assert result.exit_code == 0, result.stderr
        await until(lambda: backend.is_idle)
        status = backend.engine.status()
    told = json.loads(result.stdout)
    measured = told["measured"]
    assert measured["tokens"] == [TOKENS, TOKENS]
    assert 80 <= measured["prompt_tokens"][0] <= measured["prompt_tokens"][1] <= 120
    assert measured["first_token_ms"]["count"] == STREAMS * ROUNDS
    assert min(measured["tokens_per_s"], measured["first_token_ms"]["p50"]) > 0.0
    # One request before the first round.
    assert status.metrics["generated_tokens"] == TOKENS * (STREAMS * ROUNDS + 1)
    assert (status.metrics["prompt_cache.nodes"], status.metrics["prompt_cache.hit_tokens"]) == (
        0,
        0,
    )
    assert status.metrics["drafted_tokens"] == 0
