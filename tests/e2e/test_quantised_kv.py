"""Quantised keys and values through the socket: smaller, and the same warm as cold."""

import asyncio

import grpc
import pytest
from serving import Stderr, code_of, served

from backend.pb import backend_pb2 as pb

pytestmark = pytest.mark.mlx

PROMPT = "ba be bi bo bu " * 40
COLD = "max_cache_bytes:0"


def raw(prompt, **options):
    return pb.PredictOptions(Prompt=prompt, Tokens=12, IgnoreEOS=True, **options)


async def ask(directory, *prompts, options=(), **fields):
    """Return the replies to prompts sent one after the other, and the bytes of the prompt cache."""
    async with served(directory, Options=list(options), **fields) as backend:
        replies = [await backend.stub.Predict(raw(prompt)) for prompt in prompts]
        status = await backend.stub.Status(pb.HealthMessage())
    return [reply.message for reply in replies], status.memory.breakdown["prompt_cache"]


@pytest.mark.parametrize("fields", [{"CacheTypeKey": "q8_0"}, {"CacheTypeValue": "q4_0"}])
async def test_a_quantised_cache_answers_warm_as_cold_and_stores_less(tiny_models, fields):
    directory = tiny_models("llama_wide")
    prompts = (PROMPT, PROMPT + "du", PROMPT[:300], PROMPT[:300] + "no")
    warm, stored_bytes = await ask(directory, *prompts, **fields)
    cold, _ = await ask(directory, *prompts, options=[COLD], **fields)
    assert warm == cold
    assert stored_bytes < 0.33 * (await ask(directory, *prompts))[1]


async def test_a_model_with_a_quantised_cache_serves_many_at_once(tiny_models, capfd):
    requests = [raw(PROMPT + word, Seed=5) for word in ("du", "no", "la", "mi")]
    async with served(tiny_models("llama_wide"), Options=["kv_bits:8"]) as backend:
        alone = [(await backend.stub.Predict(request)).message for request in requests]
        together = await asyncio.gather(*map(backend.stub.Predict, requests))
    assert [reply.message for reply in together] == alone
    assert "one request at a time" not in Stderr(capfd).text


async def test_a_prompt_cache_of_fewer_bits_stores_less_and_batches(tiny_models, capfd):
    directory = tiny_models("llama_wide")
    prompts = (PROMPT, PROMPT)
    (cold, warm), stored_bytes = await ask(directory, *prompts, options=["cache_bits:8"])
    assert cold == warm
    assert stored_bytes < 0.33 * (await ask(directory, *prompts))[1]
    assert "one request at a time" not in Stderr(capfd).text


async def test_a_cache_type_that_no_one_knows_is_refused(tiny_models):
    async with served(tiny_models("llama_wide")) as backend:
        options = pb.ModelOptions(Model=str(tiny_models("llama_wide")), CacheTypeKey="int8")
        code, details = await code_of(backend.stub.LoadModel(options))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("CacheTypeKey: 'int8' is unknown")


async def test_a_model_that_cannot_be_quantised_is_served_as_it_is(tiny_models, capfd):
    async with served(tiny_models("llama"), CacheTypeKey="q8_0") as backend:
        reply = await backend.stub.Predict(raw(PROMPT))
    assert reply.tokens == 12
    await Stderr(capfd).holds("the KV cache of this model is not quantised")
