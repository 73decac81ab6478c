"""Scopes of the prompt cache: the time to the first token tells nobody the prompts of others."""

import json

import grpc
import pytest
from serving import chat, code_of, served, user
from waiting import until

from backend.pb import backend_pb2 as pb

pytestmark = pytest.mark.mlx

PROMPT = "ba be bi bo bu " * 30
SYSTEM = {"role": "system", "content": "You help. " + "be bi ba bo du " * 24}
SETTINGS = {"Tokens": 4, "IgnoreEOS": True}


def raw(prompt=PROMPT, **metadata):
    return pb.PredictOptions(Prompt=prompt, Metadata=metadata, **SETTINGS)


def asked(question, **metadata):
    return chat([SYSTEM, user(question)], Metadata=metadata, **SETTINGS)


async def hit_tokens(backend, request):
    """Ask, and return how many tokens of the prompt were stored before."""
    before = backend.engine.status().metrics
    reply = await backend.stub.Predict(request)
    counted = before["prompt_cache.looked_up_tokens"] + reply.prompt_tokens
    await until(lambda: backend.engine.status().metrics["prompt_cache.looked_up_tokens"] == counted)
    await until(lambda: backend.is_idle)
    metrics = await backend.stub.GetMetrics(pb.MetricsRequest())
    books = json.loads(metrics.prompt_json_for_slot)["prompt_cache"]
    return books["hit_tokens"] - before["prompt_cache.hit_tokens"]


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
async def test_scopes_do_not_meet_each_others_prefixes(tiny_models, family):
    async with served(tiny_models(family)) as backend:
        assert await hit_tokens(backend, raw()) == 0
        assert await hit_tokens(backend, raw(cache_scope="anna")) == 0
        assert await hit_tokens(backend, raw(cache_scope="bert")) == 0
        for metadata in ({}, {"cache_scope": "anna"}, {"cache_scope": "bert"}):
            assert await hit_tokens(backend, raw(**metadata)) > 100


async def test_a_scope_changes_no_token(tiny_models):
    async with served(tiny_models("llama")) as backend:
        replies = [
            (await backend.stub.Predict(raw(**metadata))).message
            for metadata in ({}, {"cache_scope": "anna"}, {"cache_scope": "anna"})
        ]
    assert len(set(replies)) == 1


async def test_a_system_prompt_that_is_marked_public_is_shared_and_no_more(tiny_models):
    async with served(tiny_models("llama"), MaxModelLen=8192) as backend:
        public = {"cache_public": "system"}
        assert await hit_tokens(backend, asked("Who?", cache_scope="anna", **public)) == 0
        shared = await hit_tokens(backend, asked("Who?", cache_scope="bert", **public))
        assert shared > 100
        # The question is anna's own, though bert asks the same; without a mark all is.
        whole = await hit_tokens(backend, asked("Who?", cache_scope="anna", **public))
        assert whole > shared
        assert await hit_tokens(backend, asked("Who?", cache_scope="carl")) == 0


async def test_prefixes_on_disk_keep_their_scope(tiny_models, tmp_path):
    options = {"Options": [f"cache_dir:{tmp_path}"]}
    async with served(tiny_models("llama"), **options) as backend:
        assert await hit_tokens(backend, raw(cache_scope="anna")) == 0
    async with served(tiny_models("llama"), **options) as backend:
        assert await hit_tokens(backend, raw()) == 0
        assert await hit_tokens(backend, raw(cache_scope="bert")) == 0
        assert await hit_tokens(backend, raw(cache_scope="anna")) > 100


async def test_by_option_calls_share_nothing_unless_they_name_a_scope(tiny_models):
    async with served(tiny_models("llama"), Options=["cache_sharing:none"]) as backend:
        for _ in range(2):
            assert await hit_tokens(backend, raw()) == 0
        score = pb.ScoreRequest(prompt=PROMPT, candidates=["ba"])
        for _ in range(2):
            await backend.stub.Score(score)
        assert backend.engine.status().metrics["prompt_cache.hit_tokens"] == 0
        assert await hit_tokens(backend, raw(cache_scope="anna")) == 0
        assert await hit_tokens(backend, raw(cache_scope="anna")) > 100


async def test_by_option_the_model_identity_is_the_scope(tiny_models):
    directory = tiny_models("llama")
    identified = pb.PredictOptions(Prompt=PROMPT, ModelIdentity=str(directory), **SETTINGS)
    async with served(directory, Options=["cache_sharing:identity"]) as backend:
        assert await hit_tokens(backend, raw()) == 0
        assert await hit_tokens(backend, identified) == 0
        assert await hit_tokens(backend, identified) > 100


@pytest.mark.parametrize("scope", ["x" * 129, "a\nb"])
async def test_a_scope_is_a_short_name(shared, tiny_models, scope):
    async with shared(tiny_models("llama")) as backend:
        code, details = await code_of(backend.stub.Predict(raw(cache_scope=scope)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == "Metadata['cache_scope']: must be at most 128 printable characters"
