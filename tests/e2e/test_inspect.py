"""Inspect and the status command over the socket, on a real engine at work."""

import asyncio

import pytest
from click.testing import CliRunner
from serving import UNENDING, served
from waiting import until

from backend.cli.app import main
from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc

pytestmark = pytest.mark.mlx

PROMPT = "ba be bi bo bu " * 9


def raw(name, **options):
    return pb.PredictOptions(
        Prompt=PROMPT, CorrelationId=name, **{"Tokens": 6, "IgnoreEOS": True, **options}
    )


async def inspected(backend):
    stub = backend_pb2_grpc.InspectorStub(backend.channel)
    return await stub.Inspect(pb.InspectRequest())


async def test_a_running_request_is_told_with_its_cache_hit_and_its_progress(tiny_models):
    async with served(tiny_models("llama")) as backend:
        first = await backend.stub.Predict(raw("first"))
        running = backend.stub.PredictStream(raw("second", **UNENDING))
        await until(lambda: any(r.generated_tokens > 1 for r in backend.engine.status().requests))
        reply = await inspected(backend)
        running.cancel()
    (request,) = reply.requests
    assert request.request_id.startswith("second")
    assert (request.phase, request.hit_kind) == ("active", "exact")
    assert request.prompt_tokens == first.prompt_tokens
    assert request.cached_tokens == request.prompt_tokens - 1
    assert min(request.first_token_ms, request.tokens_per_s) > 0.0
    assert reply.state == pb.StatusResponse.BUSY
    assert (reply.model.type, reply.model.context_length) == ("llama", 4096)
    assert reply.prompt_cache.hit_tokens == request.cached_tokens
    assert 0 < reply.prompt_cache.bytes < reply.prompt_cache.budget_bytes
    assert reply.memory.breakdown["kv_active"] > 0


async def test_who_has_a_reply_finds_it_counted_and_no_longer_running(tiny_models):
    async with served(tiny_models("llama")) as backend:
        running = backend.stub.PredictStream(raw("running", **UNENDING))
        await running.read()
        for i in range(10):
            await backend.stub.Predict(raw(f"quick{i}"))
            reply = await inspected(backend)
            assert all(r.request_id.startswith("running") for r in reply.requests)
            assert reply.generated_tokens > 6 * (i + 1)
            assert sum(reply.prompt_cache.hits.values()) == i + 2
        running.cancel()


async def test_the_status_command_shows_a_real_backend(tiny_models):
    async with served(tiny_models("llama")) as backend:
        await backend.stub.Predict(raw("first"))
        arguments = ["status", "--addr", backend.address]
        runner = CliRunner(env={"COLUMNS": "100"})
        result = await asyncio.to_thread(runner.invoke, main, arguments)
    assert result.exit_code == 0, result.stderr
    assert "(llama) · context 4,096" in result.output
    assert "READY · 0 of 16 slots taken · 0 waiting" in result.output
    assert "6 tokens generated" in result.output
