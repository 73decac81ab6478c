"""Calls as models drift into writing them, over a socket."""

import json

import pytest
from scripted_engine import ScriptedEngine, served, steps, stub
from serving import chat, stream, user

from backend.pb import backend_pb2 as pb

KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_call_end|>"
KIMI_ARGUMENTS, KIMI_SECTION_END = "<|tool_call_argument_begin|>", "<|tool_calls_section_end|>"


def tool(name, *required, **properties):
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TEXT = {"type": "string"}
BASH = tool("bash", "command", command=TEXT)
READ = tool("read_file_2", "path", path=TEXT)


async def reply_to(parser, text, tools, *earlier):
    loading = pb.ModelOptions(
        Model="org/tiny", Options=[f"tool_parser!:{parser}", "reasoning_parser:none"]
    )
    async with served(ScriptedEngine(steps(text), loaded=False)) as channel:
        client = stub(channel)
        assert (await client.LoadModel(loading)).success
        return await stream(client, chat([user("hi"), *earlier], tools=tools))


def called(reply):
    return [(call["name"], json.loads(call["arguments"])) for call in reply.calls.values()]


def kimi(call_id, arguments='{"command": "ls"}'):
    return f"{KIMI_BEGIN}{call_id}{KIMI_ARGUMENTS}{arguments}{KIMI_END}{KIMI_SECTION_END}"


@pytest.mark.parametrize(
    "call_id",
    [
        *("functions.bash:5", "functions_bash_5", "functions.bash0", "functionsbash5", "bash_5"),
        *("bash:0", "bash", "call00003", "call_ab12CD"),
    ],
)
async def test_an_id_of_kimi_in_any_form_is_a_call(call_id):
    reply = await reply_to("kimi_k2", kimi(call_id), [BASH])
    assert (called(reply), reply.content) == ([("bash", {"command": "ls"})], "")


@pytest.mark.parametrize("call_id", ["call_1", "functions:0", "0"])
async def test_without_a_name_the_arguments_tell_the_tool(call_id):
    reply = await reply_to("kimi_k2", kimi(call_id, '{"path": "a"}'), [BASH, READ])
    assert called(reply) == [("read_file_2", {"path": "a"})]
    reply = await reply_to("kimi_k2", kimi(call_id, '{"other": "a"}'), [BASH, READ])
    assert not reply.calls


def earlier_call(call_id):
    function = {"name": "bash", "arguments": '{"command": "pwd"}'}
    calls = json.dumps([{"id": call_id, "type": "function", "function": function}])
    return (
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": call_id, "content": "/"},
    )


async def test_an_id_of_an_earlier_call_does_not_come_again():
    text = kimi("functions.bash:0")
    reply = await reply_to("kimi_k2", text, [BASH], *earlier_call("functions.bash:0"))
    assert [call["id"] for call in reply.calls.values()] == ["functions.bash:1"]
    reply = await reply_to("kimi_k2", text, [BASH])
    assert [call["id"] for call in reply.calls.values()] == ["functions.bash:0"]
