"""Prompts of 3,000 and 6,000 tokens on SmolLM2: new, stored, after a loss and from the disk."""

import asyncio
import os
import signal

import pytest
from real_answers import FINDINGS, asked, require_reply
from serving import served
from waiting import until

from scripts.real_models.prompts import LONG_PROMPTS

pytestmark = pytest.mark.mlx

# The largest distance of a log-probability from llama.cpp's, which adds thousands of terms in
# another order.
BOUND = 2e-3
REUSED = 0.95


async def answer(backend, name, expected):
    """Require the reply of llama.cpp, and return how many of the prompt's tokens were reused."""
    before = backend.engine.status().metrics
    reply = await backend.stub.Predict(asked(name, len(expected["reply"])))
    require_reply(reply, expected, BOUND)
    counted = before["prompt_cache.looked_up_tokens"] + reply.prompt_tokens
    await until(lambda: backend.engine.status().metrics["prompt_cache.looked_up_tokens"] == counted)
    after = backend.engine.status().metrics
    return after["prompt_cache.hit_tokens"] - before["prompt_cache.hit_tokens"]


@pytest.mark.parametrize("name", LONG_PROMPTS)
async def test_a_long_prompt_has_one_reply_wherever_its_keys_come_from(
    real_models, reference, tmp_path, name
):
    expected = reference("smollm2")["replies"][name]
    most = REUSED * len(expected["prompt"])
    fields = {"findings": FINDINGS, "Options": [f"cache_dir:{tmp_path}"]}
    async with served(real_models("smollm2-f32"), **fields) as backend:
        first = asyncio.ensure_future(backend.stub.Predict(asked(name, len(expected["reply"]))))
        await until(lambda: any(r.prefilled_tokens for r in backend.engine.status().requests))
        os.kill(backend.engine.process_id, signal.SIGKILL)
        require_reply(await first, expected, BOUND)
        assert await answer(backend, name, expected) >= most
    async with served(real_models("smollm2-f32"), **fields) as backend:
        assert await answer(backend, name, expected) >= most
        os.kill(backend.engine.process_id, signal.SIGKILL)
        again = await backend.stub.Predict(asked(name, len(expected["reply"])))
        require_reply(again, expected, BOUND)
