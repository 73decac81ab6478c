import asyncio
from contextlib import aclosing

import grpc
import pytest

from backend.cli.client import BackendClient, CallError
from backend.core.step import ContentDelta, ReasoningDelta, ToolCallDelta
from backend.pb import backend_pb2 as pb

TIMEOUT_S = 30.0


async def deltas(client):
    replies = client.stream(pb.PredictOptions())
    return [delta async for reply in replies for delta in reply.deltas]


async def test_a_reply_arrives_as_typed_deltas(client, scripted, script):
    scripted.scripts = [
        [script.thought("hm"), script.content("Hi"), script.call_piece(1, id="a", name="f")]
    ]
    assert await deltas(client) == [
        ReasoningDelta("hm"),
        ContentDelta("Hi"),
        ToolCallDelta(1, "a", "f", ""),
    ]


async def test_counts_and_times_come_with_every_increment(client, scripted, script):
    scripted.scripts = [[script.content("Hi", tokens=7)]]
    (increment,) = [reply async for reply in client.stream(pb.PredictOptions())]
    assert increment.usage.completion_tokens == 7
    assert increment.usage.prompt_tokens == 30
    assert increment.usage.decode_ms == 500.0


async def test_text_of_a_backend_that_parses_nothing_is_content(client, scripted):
    scripted.scripts = [[pb.Reply(message="naïve".encode())]]
    assert await deltas(client) == [ContentDelta("naïve")]


async def test_leaving_a_stream_cancels_its_call(client, scripted, script):
    scripted.scripts = [[script.content("Hi"), script.hang]]
    async with aclosing(client.stream(pb.PredictOptions())) as increments:
        await anext(increments)
    assert await asyncio.to_thread(scripted.cancelled.wait, TIMEOUT_S)


async def test_a_status_becomes_one_line(client, scripted, script):
    refusal = script.refuse(grpc.StatusCode.INVALID_ARGUMENT, "TopP:\n too large")
    scripted.scripts = [[script.content("Hi"), refusal]]
    with pytest.raises(CallError, match=r"^INVALID_ARGUMENT: TopP: too large$"):
        await deltas(client)


async def test_a_load_without_success_is_an_error(client, scripted):
    scripted.load_result = pb.Result(success=False, message="no such\nmodel")
    with pytest.raises(CallError, match="LoadModel: no such model"):
        await client.load_model(pb.ModelOptions(Model="x"))


async def test_a_refused_connection_is_an_error():
    async with BackendClient("127.0.0.1:1") as client:
        with pytest.raises(CallError, match="UNAVAILABLE"):
            await client.check_health()


async def test_the_token_goes_with_every_call(scripted):
    scripted.token = "secret"  # noqa: S105 - a made-up one
    async with BackendClient(scripted.address, "secret") as client:
        await client.check_health()
    async with BackendClient(scripted.address) as client:
        with pytest.raises(CallError, match="wrong token"):
            await client.check_health()
