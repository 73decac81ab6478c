"""Texts in place of an object of arguments, in formats whose arguments are JSON."""

import json

import golden
import pytest
from tool_replies import FORMATS, MILK, TOOLS

from backend.core.step import FinishReason
from backend.output.reply import ReplySpec

WRITTEN = json.dumps(MILK)
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
IN_JSON = [
    name
    for name, reply in FORMATS.items()
    # Where a name begins a call, nothing but the brace tells it from an answer.
    if WRITTEN in reply.one and not golden.tool_format(reply.parser or name).names_lead_json
]
PYTHON = "{'text': 'milk', 'pri': 2}"
NOTHING = ("null", "None", "[]", '"null"', '"None"', '"{}"', '""')
SOMETHING = (
    f"[{WRITTEN}]",
    json.dumps(PYTHON),
    json.dumps(WRITTEN),
    json.dumps(json.dumps(WRITTEN)),
)


def outcomes(name, text):
    reply = FORMATS[name]
    output_format = golden.named_format(reply.parser or name, reply.reasoning)
    spec = ReplySpec(format=output_format, tools=SCHEMAS, prompt_tail=reply.prompt_tail)
    for chunks in ([text], list(text)):
        found = golden.play(spec, chunks, FinishReason.STOP)
        calls = [(call.name, json.loads(call.arguments)) for call in found.tool_calls]
        yield found.content, calls, found.finish.reason


@pytest.mark.parametrize("name", IN_JSON)
def test_a_call_of_a_tool_without_arguments_needs_no_empty_object(name):
    for text in (FORMATS[name].none.replace("{}", written) for written in NOTHING):
        for found in outcomes(name, text):
            assert found == ("", [("clock_now", {})], FinishReason.TOOL_CALLS), text


@pytest.mark.parametrize("name", IN_JSON)
def test_an_object_may_be_in_a_list_or_a_string_even_a_python_one(name):
    for text in (FORMATS[name].one.replace(WRITTEN, written) for written in SOMETHING):
        for found in outcomes(name, text):
            assert found == ("", [("note_add", MILK)], FinishReason.TOOL_CALLS), text


@pytest.mark.parametrize("fence", ["```json\n{}\n```", "```\n{}```"])
@pytest.mark.parametrize("name", ["harmony", "harmony template", "mistral", "kimi_k2"])
def test_arguments_may_be_in_a_fence(name, fence):
    text = FORMATS[name].one.replace(WRITTEN, fence.replace("{}", WRITTEN))
    for found in outcomes(name, text):
        assert found == ("", [("note_add", MILK)], FinishReason.TOOL_CALLS), text


def test_an_empty_fence_holds_no_arguments():
    text = FORMATS["deepseek_v3"].none.replace("{}", "")
    for found in outcomes("deepseek_v3", text):
        assert found == ("", [("clock_now", {})], FinishReason.TOOL_CALLS)


@pytest.mark.parametrize("body", ["nullable", "None of these", "[1, 2]", '["a"]', "```py\n1\n```"])
def test_another_body_of_a_message_to_a_tool_is_content(body):
    text = FORMATS["harmony"].none.replace("{}", body)
    for content, calls, _ in outcomes("harmony", text):
        assert (content, calls) == (body, [])
