"""The requests of the host that its users would suffer from, over the socket."""

import json

import pytest
from serving import chat, served, stream, user

from backend.demo import MODEL_DIR, WEATHER_TOOL
from backend.pb import backend_pb2 as pb

pytestmark = pytest.mark.mlx


def strict(tool):
    return {**tool, "function": {**tool["function"], "strict": True}}


# The host writes it for a tool with `strict: true`, and sends it along with the tools.
FUNCTION_GRAMMAR = r"""
string ::= "\"" [^"\\]* "\""
root-0-arguments ::= "{" "\"city\"" ":" string "}"
root-0-name ::= "\"get_weather\""
root-0 ::= "{" "\"arguments\"" ":" root-0-arguments "," "\"name\"" ":" root-0-name "}"
root ::= root-0
"""


@pytest.mark.parametrize("rpc", ["Predict", "PredictStream"])
async def test_a_strict_tool_leaves_the_model_free_to_chat(shared, rpc):
    request = chat(
        [user("Say hello to Ada.")], tools=[strict(WEATHER_TOOL)], Grammar=FUNCTION_GRAMMAR
    )
    async with shared(MODEL_DIR) as backend:
        if rpc == "Predict":
            content = (await backend.stub.Predict(request)).message.decode()
        else:
            content = (await stream(backend.stub, request)).content
    assert "Ada" in content
    assert not content.startswith("{")


async def test_a_strict_tool_is_called_in_the_models_own_format(shared):
    request = chat(
        [user("What is the weather in Hanoi?")],
        tools=[strict(WEATHER_TOOL)],
        Grammar=FUNCTION_GRAMMAR,
    )
    async with shared(MODEL_DIR) as backend:
        reply = await stream(backend.stub, request)
    (call,) = reply.calls.values()
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Hanoi"})
    assert reply.content.strip() == ""


async def test_a_thought_that_fills_the_context_does_not_make_the_host_try_again():
    request = chat([user("What is the weather in Hanoi?")], tools=[WEATHER_TOOL])
    async with served(MODEL_DIR) as backend:
        tokens = len((await backend.stub.TokenizeString(request)).tokens)
        assert (await backend.load(MODEL_DIR, MaxModelLen=tokens + 4)).success
        streamed = await stream(backend.stub, request)
        whole = await backend.stub.Predict(request)
    assert streamed.reasoning
    assert streamed.content == "\n"
    assert streamed.last.message == b"\n"
    assert "".join(delta.content for delta in whole.chat_deltas) == "\n"


async def answers(backend, request):
    """Return the texts and calls of both ways to answer, as the host reads them."""
    whole = await backend.stub.Predict(request)
    calls = {call.index: call for delta in whole.chat_deltas for call in delta.tool_calls}
    streamed = await stream(backend.stub, request)
    yield whole.message.decode(), {i: (c.name, c.arguments) for i, c in calls.items()}, whole
    named = {index: (c["name"], c["arguments"]) for index, c in streamed.calls.items()}
    yield streamed.content, named, streamed.last


async def test_a_call_that_the_limit_cut_off_does_not_reach_clients_that_would_run_a_half(shared):
    request = chat([user("What is the weather in Hanoi?")], tools=[WEATHER_TOOL])
    request.ModelIdentity = str(MODEL_DIR)
    async with shared(MODEL_DIR) as backend:
        (_, whole, last), _ = [each async for each in answers(backend, request)]
        assert json.loads(whole[0][1]) == {"city": "Hanoi"}
        seen = set()
        for limit in range(last.tokens - 16, last.tokens + 1):
            request.Tokens = limit
            one, other = [each async for each in answers(backend, request)]
            assert one[:2] == other[:2]
            assert one[1] in ({}, whole)
            seen.add(len(one[1]))
    assert seen == {0, 1}


async def test_a_call_that_the_context_cut_off_does_not_make_the_host_try_again():
    request = chat(
        [user("What is the weather in Hanoi?")], tools=[WEATHER_TOOL], ToolChoice="required"
    )
    request.Metadata["enable_thinking"] = "false"
    request.ModelIdentity = str(MODEL_DIR)
    async with served(MODEL_DIR) as backend:
        tokens = len((await backend.stub.TokenizeString(request)).tokens)
        assert (await backend.load(MODEL_DIR, MaxModelLen=tokens + 12)).success
        found = [each async for each in answers(backend, request)]
    assert [(content, calls) for content, calls, _ in found] == [("\n", {})] * 2


async def test_tool_results_of_the_hosts_anthropic_endpoint_reach_the_template_as_tool_messages(
    shared,
):
    call = {"id": "toolu_1", "type": "function"}
    call["function"] = {"name": "get_weather", "arguments": json.dumps({"city": "Hanoi"})}
    turn = [
        user("What is the weather in Hanoi?"),
        {"role": "assistant", "tool_calls": json.dumps([call])},
    ]
    text = json.dumps({"temperature": 31})
    as_tool = {"role": "tool", "name": "get_weather", "tool_call_id": "toolu_1", "content": text}
    as_text = user(f"[Tool Result for toolu_1]: {text}")
    async with shared(MODEL_DIR) as backend:
        prompts = [
            (await backend.stub.TokenizeString(chat([*turn, last], tools=[WEATHER_TOOL]))).tokens
            for last in (as_tool, as_text)
        ]
    assert prompts[0] == prompts[1]


async def test_prompts_of_claude_code_begin_alike_whoever_pays_for_them(shared):
    head = "x-anthropic-billing-header: cc_version=2.1.197.{}; cc_entrypoint=cli; cch={};"
    prompts = [
        chat([{"role": "system", "content": head.format(*words) + "You help."}, user("Hello!")])
        for words in (("c7a", "eb6c6"), ("01c", "0aaa9; cc_is_subagent=true"))
    ]
    async with shared(MODEL_DIR) as backend:
        one, other = [(await backend.stub.TokenizeString(prompt)).tokens for prompt in prompts]
    assert one == other


GREETING = {
    "type": "object",
    "properties": {"greeting": {"type": "string", "maxLength": 20}},
    "required": ["greeting"],
    "additionalProperties": False,
}


async def test_with_tools_and_a_response_format_the_reply_is_a_call_or_the_constrained_answer(
    shared,
):
    async with shared(MODEL_DIR) as backend:
        fields = {"tools": [WEATHER_TOOL], "Grammar": json.dumps(GREETING), "Tokens": 120}
        asked = await stream(backend.stub, chat([user("What is the weather in Hanoi?")], **fields))
        greeted = await stream(backend.stub, chat([user("Say hello to Paris.")], **fields))
        forced = await stream(
            backend.stub, chat([user("Say hello to Paris.")], **fields, ToolChoice="required")
        )
    assert json.loads(asked.calls[0]["arguments"]) == {"city": "Hanoi"}
    assert not asked.content.strip()
    assert not greeted.calls
    assert set(json.loads(greeted.content)) == {"greeting"}
    assert forced.calls[0]["name"] == "get_weather"


OTHER_TOOL = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
}


async def test_of_the_tools_only_the_allowed_ones_are_offered(shared):
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "get_time"}],
    }
    request = chat(
        [user("What is the weather in Hanoi?")],
        tools=[WEATHER_TOOL, OTHER_TOOL],
        ToolChoice=json.dumps(choice),
    )
    async with shared(MODEL_DIR) as backend:
        reply = await stream(backend.stub, request)
    assert reply.calls[0]["name"] == "get_time"


async def test_a_tool_that_is_offered_twice_and_foreign_words_cost_no_request(shared, caplog):
    caplog.set_level("INFO")
    request = chat(
        [user("What is the weather in Hanoi?")],
        tools=[WEATHER_TOOL, WEATHER_TOOL],
        Metadata={"priority": "urgent", "trace": "a1"},
    )
    async with shared(MODEL_DIR) as backend:
        reply = await stream(backend.stub, request)
    assert [call["name"] for call in reply.calls.values()] == ["get_weather"]
    assert "'urgent' is not one of" in caplog.text


@pytest.mark.parametrize("constrains", ["true", "false"])
async def test_without_parallel_calls_the_reply_ends_after_one(constrains):
    choice = json.dumps({"type": "auto", "disable_parallel_tool_use": True})
    question = chat(
        [user("What is the weather in Hanoi?")],
        tools=[WEATHER_TOOL],
        ToolChoice=choice,
        IgnoreEOS=True,
        Tokens=200,
    )
    async with served(MODEL_DIR, Options=[f"constrain_calls:{constrains}"]) as backend:
        reply = await stream(backend.stub, question)
    assert list(reply.calls) == [0]
    assert not reply.content.strip()
    assert reply.last.tokens < 200


@pytest.mark.parametrize(
    ("option", "is_called"), [("tool_parser:minimax_m2", True), ("tool_parser!:minimax_m2", False)]
)
async def test_a_tool_parser_that_the_importer_guessed_does_not_cost_the_calls(option, is_called):
    request = chat([user("What is the weather in Hanoi?")], tools=[WEATHER_TOOL])
    async with served(MODEL_DIR, Options=[option, "constrain_calls:false"]) as backend:
        reply = await stream(backend.stub, request)
    assert bool(reply.calls) == is_called


async def test_fields_that_nothing_comes_of_are_told_once_at_load(caplog):
    fields = {"ContextSize": 64, "DraftModel": "/none", "Options": ["speculation:off"]}
    async with served(MODEL_DIR, **fields) as backend:
        request = pb.PredictOptions(Prompt="Hello " * 100, Tokens=1)
        assert (await backend.stub.Predict(request)).prompt_tokens > 64
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.split()[0] for text in told] == ["ContextSize", "draft_model"]
