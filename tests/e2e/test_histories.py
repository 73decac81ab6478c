"""Histories with calls through the socket, on templates that do not take them as they are."""

import json
from pathlib import Path

import grpc
import pytest
from msgspec.structs import replace
from serving import chat, code_of, served, user
from tool_conversations import ANSWERED, TWO_CALLS, WEATHER

from backend.pb import backend_pb2 as pb

pytestmark = pytest.mark.mlx

TEMPLATES = Path(__file__).parent.parent / "model" / "templates"


def as_sent(message):
    calls = [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in message.tool_calls
    ]
    return {
        "role": message.role,
        "content": message.content,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": json.dumps(calls) if calls else "",
    }


@pytest.mark.parametrize("name", ["one_call", "mistral", "hermes_tool_use"])
@pytest.mark.parametrize("messages", [TWO_CALLS, ANSWERED], ids=["pending", "answered"])
async def test_a_history_with_two_calls_is_answered(shared, tiny_models, name, messages):
    options = [f"chat_template:{TEMPLATES / f'{name}.jinja'}"]
    request = chat([as_sent(message) for message in messages], tools=[WEATHER.schema], Tokens=2)
    async with shared(tiny_models("llama"), Options=options) as backend:
        assert (await backend.stub.Predict(request)).tokens <= 2
        assert (await backend.stub.TokenizeString(request)).length > 50


@pytest.mark.parametrize("content", ["", "Let me see."])
async def test_calls_that_a_template_leaves_out_are_read_as_the_family_writes_them(
    shared, tiny_models, content
):
    options = [f"chat_template:{TEMPLATES / 'no_calls.jinja'}"]
    asked, calling, *results = TWO_CALLS
    messages = [asked, replace(calling, content=content), *results]
    request = chat([as_sent(message) for message in messages], tools=[WEATHER.schema])
    async with shared(tiny_models("llama"), Options=options) as backend:
        tokens = (await backend.stub.TokenizeString(request)).tokens
        text = (await backend.stub.Detokenize(pb.DetokenizeRequest(tokens=tokens))).content
    calls = [{"name": c.name, "arguments": json.loads(c.arguments)} for c in calling.tool_calls]
    written = f"{content}\n" if content else ""
    written += f"<|tool_call|>{json.dumps(calls, ensure_ascii=False)}<|end_of_text|>"
    assert f"<|start_of_role|>assistant<|end_of_role|>{written}" in text


async def test_the_log_says_how_the_format_of_calls_was_found(tiny_models, caplog):
    caplog.set_level("INFO")
    options = [f"chat_template:{TEMPLATES / 'one_call.jinja'}"]
    async with served(tiny_models("llama"), Options=options) as backend:
        assert backend.engine.model.format.tools.name == "llama3_json"
    assert "the format of tool calls is llama3_json, by the call in its template" in caplog.text


async def test_what_no_form_helps_is_refused_with_the_templates_words(tiny_models, tmp_path):
    strict = tmp_path / "strict.jinja"
    strict.write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if messages|length > 2 %}{{ raise_exception('Too long a story') }}{% endif %}"
    )
    async with served(tiny_models("llama"), Options=[f"chat_template:{strict}"]) as backend:
        code, details = await code_of(backend.stub.Predict(chat(list(map(as_sent, ANSWERED)))))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == "Messages: Too long a story"


@pytest.mark.parametrize("arguments", [r'{"city": "\ud83d Oslo"}', {"city": "\ufffd Oslo"}])
async def test_half_a_character_in_an_earlier_call_does_not_end_the_conversation(
    shared, tiny_models, arguments
):
    call = {"id": "c", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        user("Oslo?"),
        {"role": "assistant", "tool_calls": json.dumps([call])},
        {"role": "tool", "content": "rain", "tool_call_id": "c"},
    ]
    options = [f"chat_template:{TEMPLATES / 'hermes_tool_use.jinja'}"]
    request = chat(messages, tools=[WEATHER.schema], Tokens=2)
    async with shared(tiny_models("llama"), Options=options) as backend:
        ids = (await backend.stub.TokenizeString(request)).tokens
        text = (await backend.stub.Detokenize(pb.DetokenizeRequest(tokens=ids))).content
    assert '{"city": "\ufffd Oslo"}' in text or r'{"city": "\ufffd Oslo"}' in text
