"""The main job on the embedded model: a chat with a thought and a tool call, over the socket."""

import asyncio
import json
from contextlib import aclosing

import pytest
import pytest_asyncio
from serving import chat, inspect, served, stream, undrafted, user

from backend.core.prompt import Message
from backend.core.request import GenerationCall, GenerationParams
from backend.core.step import FinishReason
from backend.demo import MODEL_DIR, WEATHER_TOOL
from backend.pb import backend_pb2 as pb
from backend.pipeline.generate import generate
from scripts.host_suite.capabilities import HOST_QUESTION, HOST_SYSTEM, HOST_TOOL

PARAMS = GenerationParams(request_id="fast")

pytestmark = pytest.mark.mlx

TOOL_NAME = WEATHER_TOOL["function"]["name"]
(ARGUMENT,) = WEATHER_TOOL["function"]["parameters"]["required"]
QUESTION = "What is the weather in Paris?"


@pytest_asyncio.fixture(loop_scope="module")
async def backend(shared):
    async with shared(MODEL_DIR) as running:
        yield running


def markup_free(text: str) -> bool:
    return not any(mark in text for mark in ("<think", "</think", "<tool_call", "<|im_"))


@pytest.mark.smoke
async def test_a_chat_thinks_then_calls_the_tool(backend):
    reply = await stream(backend.stub, chat([user(QUESTION)], tools=[WEATHER_TOOL]))
    assert reply.reasoning.strip()
    assert reply.message == reply.content == ""
    assert list(reply.calls) == [0]
    assert reply.calls[0]["name"] == TOOL_NAME
    assert json.loads(reply.calls[0]["arguments"]) == {ARGUMENT: "Paris"}
    assert markup_free(reply.reasoning + reply.content)


async def test_the_call_is_streamed_in_pieces_and_sent_once(backend):
    counts = []
    # On a busy machine tokens may come together.
    while len(counts) < 10 or (max(counts) == 1 and len(counts) < 200):
        reply = await stream(backend.stub, chat([user(QUESTION)], tools=[WEATHER_TOOL]))
        pieces = [p for r in reply.replies for d in r.chat_deltas for p in d.tool_calls]
        assert [bool(p.name) for p in pieces].count(True) == 1
        assert [bool(p.id) for p in pieces].count(True) == 1
        assert not any(r.chat_deltas for r in reply.replies[-1:] if r.message)
        counts.append(sum(bool(p.arguments) for p in pieces))
    assert max(counts) > 1


async def test_the_tool_result_is_answered(backend):
    first = await stream(backend.stub, chat([user(QUESTION)], tools=[WEATHER_TOOL]))
    call = first.calls[0]
    history = json.dumps(
        [
            {
                "index": 0,
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
        ]
    )
    result = json.dumps({"temp": 21, "sky": "sunny"})
    messages = [
        user(QUESTION),
        {"role": "assistant", "tool_calls": history},
        {"role": "tool", "content": result, "tool_call_id": call["id"]},
    ]
    reply = await stream(backend.stub, chat(messages, tools=[WEATHER_TOOL]))
    assert not reply.calls
    assert reply.message == reply.content
    assert "Paris" in reply.message
    assert "21" in reply.message
    assert "sunny" in reply.message


async def test_two_cities_are_two_calls(backend):
    question = "What is the weather in Paris and London?"
    reply = await stream(backend.stub, chat([user(question)], tools=[WEATHER_TOOL]))
    assert list(reply.calls) == [0, 1]
    cities = [json.loads(call["arguments"])[ARGUMENT] for call in reply.calls.values()]
    assert cities == ["Paris", "London"]
    assert reply.calls[0]["id"] != reply.calls[1]["id"]


async def test_thinking_can_be_switched_off_and_on(backend):
    greeting = [user("Say hello to Paris.")]
    unset = await stream(backend.stub, chat(greeting))
    on = await stream(backend.stub, chat(greeting, Metadata={"enable_thinking": "true"}))
    off = await stream(backend.stub, chat(greeting, Metadata={"enable_thinking": "false"}))
    blob = json.dumps({"enable_thinking": False})
    by_blob = await stream(backend.stub, chat(greeting, Metadata={"chat_template_kwargs": blob}))
    assert unset.reasoning == on.reasoning != ""
    assert off.reasoning == by_blob.reasoning == ""
    assert {r.message for r in (unset, on, off, by_blob)} == {"Hello, Paris!"}


@pytest.mark.parametrize(
    "metadata",
    [
        {"reasoning_effort": "none"},
        {"enable_thinking": "False"},
        {"enable_thinking": "0"},
        {"thinking": '{"type": "disabled"}'},
        {"chat_template_kwargs": '{"enable_thinking": "false"}'},
        {"chat_template_kwargs": '{"thinking": {"type": "disabled"}}'},
        {"chat_template_kwargs": '{"reasoning_effort": "none"}'},
    ],
    ids=str,
)
async def test_thinking_is_off_in_any_words(backend, metadata):
    reply = await stream(backend.stub, chat([user("Say hello to Paris.")], Metadata=metadata))
    assert (reply.reasoning, reply.message) == ("", "Hello, Paris!")


@pytest.mark.smoke
async def test_unary_is_the_fold_of_the_stream(backend):
    requests = [
        chat([user(QUESTION)], tools=[WEATHER_TOOL]),
        chat([user("Say hello to London.")]),
        chat([user("Hello")], Temperature=1.0, Seed=11),
        chat([user(QUESTION)], tools=[WEATHER_TOOL], Tokens=15),
    ]
    for request in requests:
        unary, folded = await asyncio.gather(
            backend.stub.Predict(request), stream(backend.stub, request)
        )
        assert unary.message.decode() == folded.message
        assert "".join(d.content for d in unary.chat_deltas) == folded.content
        assert "".join(d.reasoning_content for d in unary.chat_deltas) == folded.reasoning
        calls = [c for d in unary.chat_deltas for c in d.tool_calls]
        expected = [(c["name"], c["arguments"]) for c in folded.calls.values()]
        assert [(c.name, c.arguments) for c in calls] == expected
        assert (unary.tokens, unary.prompt_tokens) == (
            folded.last.tokens,
            folded.last.prompt_tokens,
        )


async def test_hidden_tools_are_not_called(backend):
    choice = {"ToolChoice": '"none"'}
    reply = await stream(backend.stub, chat([user(QUESTION)], tools=[WEATHER_TOOL], **choice))
    assert not reply.calls
    shown = await backend.stub.TokenizeString(chat([user(QUESTION)], tools=[WEATHER_TOOL]))
    hidden = await backend.stub.TokenizeString(
        chat([user(QUESTION)], tools=[WEATHER_TOOL], **choice)
    )
    assert hidden.length < shown.length


async def test_messages_win_over_a_prompt(backend):
    request = chat([user("Say hello to Paris.")], Prompt="The capital of")
    assert (await backend.stub.Predict(request)).message == b"Hello, Paris!"


async def test_a_stop_finish_never_reaches_the_limit(backend):
    request = chat([user("Say hello to Paris.")])
    natural = (await backend.stub.Predict(request)).tokens
    request.Tokens = natural + 1
    assert (await backend.stub.Predict(request)).tokens == natural
    request.Tokens = natural
    assert (await backend.stub.Predict(request)).tokens == natural


async def test_a_cut_off_call_is_no_complete_call(backend):
    request = chat([user(QUESTION)], tools=[WEATHER_TOOL])
    total = (await backend.stub.Predict(request)).tokens
    for limit in range(total - 12, total):
        request.Tokens = limit
        reply = await stream(backend.stub, request)
        assert reply.last.tokens == limit
        assert markup_free(reply.message)


async def test_eight_chats_at_once_are_kept_apart(backend):
    cities = ["Paris", "London", "Tokyo", "Berlin", "Madrid", "Rome", "Oslo", "Cairo"]
    requests = [chat([user(f"Say hello to {city}.")]) for city in cities]
    replies = await asyncio.gather(*(stream(backend.stub, request) for request in requests))
    assert [reply.message for reply in replies] == [f"Hello, {city}!" for city in cities]


async def test_a_developer_speaks_as_the_system(backend):
    tokens = []
    for role in ("system", "developer"):
        request = chat([{"role": role, "content": "You are a helpful assistant."}, user("Hi")])
        tokens.append(list((await backend.stub.TokenizeString(request)).tokens))
    assert tokens[0] == tokens[1]


async def test_the_log_has_one_line_per_request_and_no_text(caplog):
    caplog.set_level("INFO")
    async with served(MODEL_DIR) as backend:
        reply = await backend.stub.Predict(chat([user("Say hello to Paris.")], CorrelationId="abc"))
    lines = [r.getMessage() for r in caplog.records if "request id=" in r.getMessage()]
    assert len(lines) == 1
    for part in (
        "id=abc",
        f"prompt_tokens={reply.prompt_tokens}",
        "cached_tokens=0",
        f"generated_tokens={reply.tokens}",
        "first_token_ms=",
        "tokens_per_s=",
        f"finish={FinishReason.STOP.value}",
    ):
        assert part in lines[0]
    assert "Paris" not in caplog.text


async def test_the_hosts_own_suite_would_pass(backend):
    """Section 5 of the host's contract, call by call."""
    raw = {"Tokens": 20, "Temperature": 0.1, "TopK": 40, "TopP": 0.9}
    predict = await backend.stub.Predict(
        pb.PredictOptions(Prompt="The capital of France is", **raw)
    )
    assert predict.message
    told = pb.PredictOptions(Prompt="Once upon a time", **raw)
    streams = [await stream(backend.stub, told) for _ in range(10)]
    streamed = [[r.message for r in each.replies if r.message] for each in streams]
    # On a busy machine tokens may come together.
    pieces = max(streamed, key=len)
    assert pieces[0] != pieces[1]
    logprobs = await backend.stub.Predict(
        pb.PredictOptions(
            Prompt="The capital of France is", Logprobs=1, TopLogprobs=1, **{**raw, "Tokens": 10}
        )
    )
    assert logprobs.message
    assert logprobs.logprobs
    biased = await backend.stub.Predict(
        pb.PredictOptions(Prompt="The capital of France is", LogitBias='{"1":-100}', **raw)
    )
    assert biased.message
    messages = [{"role": "system", "content": HOST_SYSTEM}, user(HOST_QUESTION)]
    called = await backend.stub.Predict(
        chat(messages, tools=[HOST_TOOL], ToolChoice="auto", Tokens=200, Temperature=0.1, Seed=1)
    )
    assert "get_weather" in [c.name for d in called.chat_deltas for c in d.tool_calls]


async def test_a_unary_tool_request_stalls_nobody(backend):
    """Counted by the engine: how far a client has read says little on a busy machine."""
    endless = pb.PredictOptions(Prompt="Once", IgnoreEOS=True)
    asked = chat([user(QUESTION)], tools=[WEATHER_TOOL])
    # The preparations of a first request of this kind take long, and nothing is really endless.
    await backend.stub.Predict(undrafted(asked))
    call = backend.stub.PredictStream(undrafted(endless))
    await call.read()
    unary = await backend.stub.Predict(undrafted(asked))
    [streamed] = (await inspect(backend)).requests
    call.cancel()
    assert streamed.generated_tokens >= unary.tokens / 2


async def test_a_client_that_leaves_right_after_the_finish_is_no_abort(backend, caplog):
    caplog.set_level("INFO")
    engine = backend.engine
    increments = generate(_call("Say hello to Paris."), engine.model, engine)
    async with aclosing(increments):
        async for increment in increments:
            if increment.finish is not None:
                break
    lines = [r.getMessage() for r in caplog.records if "request id=" in r.getMessage()]
    assert [line.rsplit("finish=", 1)[1] for line in lines] == ["stop"]


def _call(text: str) -> GenerationCall:
    return GenerationCall(params=PARAMS, messages=(Message(role="user", content=text),))
