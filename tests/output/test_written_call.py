"""The call that a template writes tells the format, with no marker known beforehand."""

import logging
from types import SimpleNamespace

import pytest

from backend.core.model import ModelKind
from backend.formats.format import FormatEvidence
from backend.formats.registry import TOOL_FORMATS
from backend.output.detection import detect, find_by_call
from backend.pipeline.generate import tell_format

ARGUMENTS = '{"probe_key": "probe_value"}'
WRITTEN = {
    "hermes_json": f'<tool_call>\n{{"name": "probe_tool", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama3_json": f'{{"name": "probe_tool", "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "probe_tool", "arguments": {ARGUMENTS}, '
    '"id": "probe0001"}]',
    "qwen3_coder_xml": "<tool_call>\n<function=probe_tool>\n<parameter=probe_key>\nprobe_value\n"
    "</parameter>\n</function>\n</tool_call>",
    "mimo": "<tool_call>\n<function=probe_tool>\n<parameter=probe_key>probe_value</parameter>\n"
    "</function>\n</tool_call>",
    "glm4": "<tool_call>probe_tool\n<arg_key>probe_key</arg_key>\n"
    "<arg_value>probe_value</arg_value>\n</tool_call>",
    "gemma4": '<|tool_call>call:probe_tool{probe_key:<|"|>probe_value<|"|>}<tool_call|>',
    "harmony": f" to=functions.probe_tool<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.probe_tool:0"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    "hunyuan_v1": f"<tool_calls><tool_call>probe_tool\n```json\n{ARGUMENTS}\n```</tool_call>"
    "</tool_calls>",
    "minicpm3": '<|tool_call_start|>\n```python\nprobe_tool(probe_key="probe_value")\n```\n'
    "<|tool_call_end|>\n",
    "pythonic": '<|tool_call_start|>[probe_tool(probe_key="probe_value")]<|tool_call_end|>',
}
UNKNOWN = [
    "",
    "I called probe_tool with probe_key set to probe_value.",
    f"<unknown>probe_tool {ARGUMENTS}</unknown>",
    # Another call than the one that was asked for.
    '<tool_call>\n{"name": "probe_tool", "arguments": {}}\n</tool_call>',
]


@pytest.mark.parametrize("end", ["", "<|im_end|>\n<|im_start|>assistant\n"])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_in_the_words_of_a_format_tells_it(name, end):
    assert find_by_call(TOOL_FORMATS, WRITTEN[name] + end).name == name


# Layouts of a few templates: marks around a remark (Llama 4), no lines (EXAONE 4, OLMo 3), other
# keys (Intern-S1), an indented list (Jamba).
OTHERWISE = [
    ("hermes_json", f'<tool_call>{{"name": "probe_tool", "arguments": {ARGUMENTS}}}</tool_call>'),
    ("olmo3", '<function_calls>probe_tool(probe_key="probe_value")</function_calls>'),
    (
        "internlm2",
        f"<|action_start|><|plugin|>\n{WRITTEN['llama3_json']}\n<|action_end|><|im_end|>",
    ),
    (
        "json_list",
        f'<tool_calls>[\n    {{"name": "probe_tool", "arguments": {ARGUMENTS}}}\n]</tool_calls>',
    ),
    ("llama3_json", f"<|python_start|><|python_end|>{WRITTEN['llama3_json']}<|eot|>"),
]


@pytest.mark.parametrize(("name", "text"), OTHERWISE)
def test_a_call_in_another_layout_tells_its_format(name, text):
    assert find_by_call(TOOL_FORMATS, text).name == name


@pytest.mark.parametrize("text", UNKNOWN)
def test_a_text_that_no_format_writes_tells_none(text):
    assert find_by_call(TOOL_FORMATS, text) is None


def test_the_call_counts_more_than_clues_and_less_than_an_option_that_forces(caplog):
    caplog.set_level(logging.INFO)
    template = "<tool_call> tool_call.name"
    assert detect(FormatEvidence((), template)).tools.name == "hermes_json"
    written = {"written_call": WRITTEN["llama3_json"]}
    assert detect(FormatEvidence((), template, **written)).tools.name == "llama3_json"
    by_option = FormatEvidence((), template, tool_parser="mistral!", **written)
    assert detect(by_option).tools.name == "mistral"
    assert [record.getMessage() for record in caplog.records] == [
        "the format of tool calls is hermes_json, by clues",
        "the format of tool calls is llama3_json, by the call in its template",
        "the format of tool calls is mistral, by an option",
    ]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("", "text with no tool calls and no thoughts"),
        ("<tool_call> tool_call.name", "text with tool calls in hermes_json and no thoughts"),
        ("<think></think>", "text with no tool calls and thoughts in think"),
    ],
)
def test_the_log_says_in_words_how_replies_are_read(caplog, template, words):
    caplog.set_level(logging.INFO)
    card = SimpleNamespace(kind=ModelKind.DECODER, name="x")
    tell_format(SimpleNamespace(card=card, format=detect(FormatEvidence((), template))))
    assert caplog.messages[-1] == f"replies of x are read as {words}"
