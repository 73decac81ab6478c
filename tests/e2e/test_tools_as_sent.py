"""Tools as clients send them, through the socket, with templates of real models and our own."""

import json
from pathlib import Path

import grpc
import pytest
from odd_tools import NAME, ODD_TOOLS, PURPOSE, WELL_FORMED, tool
from serving import chat, code_of, served, stream, user
from tool_conversations import QUESTION, WEATHER

from backend.pb import backend_pb2 as pb
from scripts.real_templates import TARGET

pytestmark = pytest.mark.mlx

OWN = Path(__file__).parent.parent / "model" / "templates"
# The first three refuse most odd tools.
REAL = ["openai-gpt-oss-120b", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "ByteDance-Seed-OSS"]
TEMPLATES = [OWN / "hermes_tool_use.jinja", *(TARGET / f"{name}.jinja" for name in REAL)]
SHORT = {"Tokens": 80, "Metadata": {"thinking_budget": "0"}}
# A tool of the Responses API, as the host passes it on.
HOSTS = tool() | {"function": {"name": "", "description": "", "parameters": None}}


async def prompt(backend, request):
    ids = (await backend.stub.TokenizeString(request)).tokens
    return (await backend.stub.Detokenize(pb.DetokenizeRequest(tokens=ids))).content


@pytest.fixture(params=TEMPLATES, ids=lambda path: path.stem)
def options(request):
    if not request.param.exists():
        pytest.skip("make templates has not run")
    return [f"chat_template:{request.param}"]


async def test_odd_tools_are_in_the_prompt(shared, tiny_models, options):
    async with shared(tiny_models("llama"), Options=options) as backend:
        for odd in (*ODD_TOOLS.values(), {"name": NAME, "input_schema": {}}):
            text = await prompt(backend, chat([user("U")], tools=[odd]))
            assert NAME in text
            assert PURPOSE in text or PURPOSE not in json.dumps(odd)


async def test_tools_of_other_kinds_change_nothing(shared, tiny_models, options):
    async with shared(tiny_models("llama"), Options=options) as backend:
        plain = await prompt(backend, chat([user("U")]))
        with_one = await prompt(backend, chat([user("U")], tools=[WELL_FORMED]))
        for other in ({"type": "web_search"}, {"type": "custom", "name": "x"}, HOSTS):
            assert await prompt(backend, chat([user("U")], tools=[other])) == plain
            both = chat([user("U")], tools=[other, WELL_FORMED])
            assert await prompt(backend, both) == with_one
            code, details = await code_of(
                backend.stub.Predict(chat([user("U")], tools=[other], ToolChoice="required"))
            )
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert details.startswith("ToolChoice: wants a tool call, but Tools has only")


async def test_a_required_call_of_an_odd_tool_is_made(shared, tiny_models, options):
    odd = ODD_TOOLS["only a name"]
    request = chat([user("U")], tools=[odd], ToolChoice="required", **SHORT)
    async with shared(tiny_models("llama"), Options=options) as backend:
        reply = await backend.stub.Predict(request)
    names = [call.name for delta in reply.chat_deltas for call in delta.tool_calls]
    assert NAME in names


PLAIN = [f"chat_template:{OWN / 'plain.jinja'}"]
CALLED = [
    user(QUESTION.content),
    {
        "role": "assistant",
        "content": "Let me look.",
        "tool_calls": json.dumps(
            [{"id": "c1", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]
        ),
    },
    {"role": "tool", "content": "rain in Oslo", "tool_call_id": "c1"},
]


async def test_a_template_without_tools_gets_them_as_text(shared, tiny_models):
    async with shared(tiny_models("llama"), Options=PLAIN) as backend:
        text = await prompt(backend, chat(CALLED, tools=[WEATHER.schema]))
        earlier = await prompt(backend, chat(CALLED[:1], tools=[WEATHER.schema]))
        assert backend.engine.model.format.tools.name == "hermes_json"
    assert text.startswith(earlier.removesuffix("<|im_start|>assistant\n"))
    assert json.dumps(WEATHER.schema) in text
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert f"assistant\nLet me look.\n{call}<|im_end|>" in text
    assert "user\n<tool_response>\nrain in Oslo\n</tool_response><|im_end|>" in text


@pytest.mark.parametrize("choice", ["required", '{"type": "function", "name": "weather"}'])
async def test_a_template_without_tools_makes_required_calls(shared, tiny_models, choice):
    city = {"type": "string", "enum": ["Oslo", "Rome"]}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    tools = [tool(parameters={"type": "object"}), tool(name="weather", parameters=parameters)]
    request = chat(CALLED, tools=tools[-1:], ToolChoice=choice, **SHORT)
    async with shared(tiny_models("llama"), Options=PLAIN) as backend:
        reply = await stream(backend.stub, request)
        assert (await backend.stub.Predict(chat(CALLED, tools=tools, Tokens=2))).tokens == 2
    assert reply.message == ""
    assert [call["name"] for call in reply.calls.values()][:1] == ["weather"]
    assert json.loads(reply.calls[0]["arguments"])["city"] in ("Oslo", "Rome")


async def test_the_load_says_that_tools_are_written(tiny_models, caplog):
    caplog.set_level("INFO")
    async with served(tiny_models("llama"), Options=PLAIN) as backend:
        assert backend.engine.model.card.supports_tools
    assert caplog.text.count("knows no tools: they are written into") == 1
    assert "the format of tool calls is hermes_json, in which the tools are written" in caplog.text
