"""A call in a thought that is closed later, as the option says, over a socket."""

import grpc
import pytest
from scripted_engine import ScriptedEngine, served, steps, stub
from serving import chat, code_of, stream, user

from backend.pb import backend_pb2 as pb

CALL = '<tool_call>{"name": "clock_now", "arguments": {}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "clock_now", "parameters": {"type": "object"}}}
ASKED = chat([user("hi")], tools=[TOOL])


def loading(*options):
    parsers = ("tool_parser!:hermes_json", "reasoning_parser:think")
    return pb.ModelOptions(Model="org/tiny", Options=[*parsers, *options])


async def reply_to(text, *options):
    async with served(ScriptedEngine(steps(text), loaded=False)) as channel:
        client = stub(channel)
        await client.LoadModel(loading(*options))
        return await stream(client, ASKED)


@pytest.mark.parametrize("options", [(), ("calls_in_thoughts:draft",)])
async def test_a_call_in_a_thought_is_a_part_of_the_thought(options):
    reply = await reply_to(f"<think>First {CALL} then.</think>Noon.", *options)
    assert reply.reasoning == f"First {CALL} then."
    assert reply.content == "Noon."
    assert not reply.calls


async def test_with_the_option_it_is_a_call_that_ends_the_thought():
    reply = await reply_to(f"<think>First{CALL}</think>", "calls_in_thoughts:call")
    assert reply.reasoning == "First"
    assert [call["name"] for call in reply.calls.values()] == ["clock_now"]
    assert not reply.content


async def test_another_value_is_refused_by_name():
    async with served(ScriptedEngine(loaded=False)) as channel:
        client = stub(channel)
        call = client.LoadModel(loading("calls_in_thoughts:never"))
        assert await code_of(call) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "Options: calls_in_thoughts: must be one of draft, call, not never",
        )
