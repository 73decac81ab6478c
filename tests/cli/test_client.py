from contextlib import closing

import grpc
import pytest

from backend.cli.client import BackendClient, CallError
from backend.core.delta import ContentDelta, ReasoningDelta, ToolCallDelta
from backend.pb import backend_pb2 as pb

TIMEOUT_S = 10.0


def deltas(client):
    return [delta for reply in client.stream(pb.PredictOptions()) for delta in reply.deltas]


def test_a_reply_arrives_as_typed_deltas(client, scripted, script):
    scripted.scripts = [
        [script.thought("hm"), script.content("Hi"), script.call_piece(1, id="a", name="f")]
    ]
    assert deltas(client) == [
        ReasoningDelta("hm"),
        ContentDelta("Hi"),
        ToolCallDelta(1, "a", "f", ""),
    ]


def test_counts_and_times_come_with_every_increment(client, scripted, script):
    scripted.scripts = [[script.content("Hi", tokens=7)]]
    (increment,) = client.stream(pb.PredictOptions())
    assert increment.usage.completion_tokens == 7
    assert increment.usage.prompt_tokens == 30
    assert increment.usage.decode_ms == 500.0


def test_text_of_a_backend_that_parses_nothing_is_content(client, scripted):
    scripted.scripts = [[pb.Reply(message="naïve".encode())]]
    assert deltas(client) == [ContentDelta("naïve")]


def test_leaving_a_stream_cancels_its_call(client, scripted, script):
    scripted.scripts = [[script.content("Hi"), script.hang]]
    with closing(client.stream(pb.PredictOptions())) as increments:
        next(increments)
    assert scripted.cancelled.wait(TIMEOUT_S)


def test_a_status_becomes_one_line(client, scripted, script):
    refusal = script.refuse(grpc.StatusCode.INVALID_ARGUMENT, "TopP:\n too large")
    scripted.scripts = [[script.content("Hi"), refusal]]
    with pytest.raises(CallError, match=r"^INVALID_ARGUMENT: TopP: too large$"):
        deltas(client)


def test_a_load_without_success_is_an_error(client, scripted):
    scripted.load_result = pb.Result(success=False, message="no such\nmodel")
    with pytest.raises(CallError, match="LoadModel: no such model"):
        client.load_model(pb.ModelOptions(Model="x"))


def test_a_refused_connection_is_an_error():
    with BackendClient("127.0.0.1:1") as client, pytest.raises(CallError, match="UNAVAILABLE"):
        client.check_health()


def test_the_token_goes_with_every_call(scripted):
    scripted.token = "secret"  # noqa: S105 - a made-up one
    with BackendClient(scripted.address, "secret") as client:
        client.check_health()
    with BackendClient(scripted.address) as client, pytest.raises(CallError, match="wrong token"):
        client.check_health()
