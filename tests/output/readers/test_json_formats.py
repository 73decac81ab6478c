"""Formats with JSON arguments, beyond the golden cases: ids, and when deltas leave."""

import json

import golden
import pytest

from backend.core.step import ContentDelta, ToolCallDelta
from backend.formats.named import MISTRAL as MISTRAL_FORMAT
from backend.output.readers.reader import new_call_id
from backend.output.router import Router

TOOLS = {"f": {}, "get-weather.v2": {}}

KIMI = (
    "<|tool_calls_section_begin|>"
    "<|tool_call_begin|>functions.f:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    "<|tool_call_begin|>functions.get-weather.v2:{}<|tool_call_argument_begin|>{{}}"
    "<|tool_call_end|><|tool_calls_section_end|>"
)
COHERE = (
    '<|START_ACTION|>[{{"tool_call_id": "{}", "tool_name": "f", "parameters": {{}}}},'
    '{{"tool_name": "f", "parameters": {{}}, "tool_call_id": {}}}]<|END_ACTION|>'
)
MISTRAL = "[TOOL_CALLS]f[CALL_ID]{}[ARGS]{{}}[TOOL_CALLS]f[CALL_ID]{}[ARGS]{{}}"
MISTRAL_LIST = (
    '[TOOL_CALLS][{{"name": "f", "arguments": {{}}, "id": "{}"}},'
    '{{"id": "{}", "name": "f", "arguments": {{}}}}]'
)


def make_router(name):
    return Router(golden.named_format(name, "none"), tools=TOOLS)


def call_ids(name, text, size=1):
    """Return the last id that each call was given."""
    router = make_router(name)
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    deltas = [delta for chunk in chunks for delta in router.feed(chunk)]
    deltas += router.finish(truncated=False)
    calls = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
    assert router.completed_calls == {delta.index for delta in calls}
    return list({delta.index: delta.call_id for delta in calls if delta.call_id}.values())


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("name", "text", "ids", "kept"),
    [
        ("kimi_k2", KIMI, ("12", "13"), ["functions.f:12", "functions.get-weather.v2:13"]),
        ("cohere", COHERE, ("0", "1"), ["0", "1"]),
        ("mistral", MISTRAL, ("aB3dE5fG7", "hJ2kL4mN6"), ["aB3dE5fG7", "hJ2kL4mN6"]),
        ("mistral", MISTRAL_LIST, ("aB3dE5fG7", "hJ2kL4mN6"), ["aB3dE5fG7", "hJ2kL4mN6"]),
    ],
)
def test_an_id_that_the_model_wrote_is_kept(name, text, ids, kept, size):
    assert call_ids(name, text.format(*ids), size) == kept


@pytest.mark.parametrize(
    ("name", "text"), [("cohere", COHERE), ("mistral", MISTRAL), ("mistral", MISTRAL_LIST)]
)
def test_an_id_that_comes_twice_is_replaced(name, text):
    first, second = call_ids(name, text.format("1", "1"))
    assert first == "1"
    assert second not in ("", "1")


@pytest.mark.parametrize("value", ["null", "{}", "[]", "true", '""', r'"\ud83d"', "1" * 300])
def test_what_cannot_be_an_id_is_none(value):
    text = f'<|START_ACTION|>[{{"tool_call_id": {value}, "tool_name": "f"}}]<|END_ACTION|>'
    assert [call_id[:5] for call_id in call_ids("cohere", text)] == ["call_"]


def test_mistral_is_given_ids_that_its_templates_take():
    ids = call_ids("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{}")
    ids += [new_call_id(MISTRAL_FORMAT.id_chars) for _ in range(100)]
    assert len(set(ids)) == len(ids)
    assert all(len(call_id) == 9 and call_id.isascii() and call_id.isalnum() for call_id in ids)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>"),
        ("mistral", "[TOOL_CALLS]f[ARGS]"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": '),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": '),
        ("llama3_json", "<function=f>"),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": '),
        ("cohere", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": '),
        ("nemotron", '<TOOLCALL>[{"name": "f", "arguments": '),
        ("json_list", '<tool_calls>[{"name": "f", "arguments": '),
        ("phi4", 'functools[{"name": "f", "arguments": '),
        ("llama3_json", '{"name": "f", "parameters": '),
        ("granite", '[{"name": "f", "arguments": '),
        ("functionary", "f\n"),
        ("apertus", '<|tools_prefix|>[{"f": '),
    ],
)
def test_a_name_leaves_with_the_first_value(name, head):
    router = make_router(name)
    assert not [delta for char in head + '{"a": ' for delta in router.feed(char)]
    name_delta, arguments = router.feed("[")
    assert (name_delta.name, bool(name_delta.call_id)) == ("f", True)
    assert arguments.arguments == '{"a": ['


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"),
        ("mistral", "[TOOL_CALLS]f[ARGS]"),
        ("llama3_json", '{"name": "f", "parameters": '),
        ("cohere", '<|START_ACTION|>[{"tool_name": "f", "parameters": '),
        ("functionary", "f\n"),
        ("apertus", '<|tools_prefix|>[{"f": '),
    ],
)
def test_arguments_leave_as_they_are_written(name, head):
    router = make_router(name)
    router.feed(head + '{"a": "')
    pieces = ["x", "y", "\\n", '", "b": [', "12]"]
    assert [[delta.arguments for delta in router.feed(piece)] for piece in pieces] == [
        [piece] for piece in pieces
    ]


@pytest.mark.parametrize(("end", "expected"), [("null", ["f"]), (" null ", ["f"]), ("nul", [])])
def test_null_at_the_end_of_a_reply_is_no_arguments(end, expected):
    router = make_router("mistral")
    deltas = [*router.feed(f"[TOOL_CALLS]f[ARGS]{end}"), *router.finish(truncated=False)]
    calls = [each for each in deltas if isinstance(each, ToolCallDelta)]
    assert [each.name for each in calls if each.name] == expected
    assert [each.arguments for each in calls if each.arguments] == ["{}"] * len(expected)


def test_a_json_answer_is_not_held_up():
    router = make_router("llama3_json")
    text = '{"name": "Ada", "parameters": {"a": 1}}'
    sent = [delta for char in text for delta in router.feed(char)]
    assert "".join(delta.text for delta in sent) == text
    assert "".join(delta.text for delta in sent[:2]) == '{"name": "A'


def test_misspelt_arguments_are_no_call_without_arguments():
    router = make_router("hermes_json")
    deltas = router.feed('<tool_call>{"name": "f", "argumets": {"a": 1}}</tool_call>')
    assert deltas == [ContentDelta('{"name": "f", "argumets": {"a": 1}}')]
    assert not router.completed_calls


@pytest.mark.parametrize("name", ["mistral", "kimi_k2", "functionary"])
def test_a_deep_value_costs_no_stack(name):
    heads = {
        "mistral": "[TOOL_CALLS]f[ARGS]",
        "kimi_k2": "<|tool_call_begin|>f:0<|tool_call_argument_begin|>",
        "functionary": "f\n",
    }
    value = "[" * 50_000 + "]" * 50_000
    router = make_router(name)
    deltas = router.feed(heads[name] + f'{{"a": {value}}}') + router.finish(truncated=False)
    arguments = "".join(delta.arguments for delta in deltas)
    assert json.dumps({"a": 0}).replace("0", value) == arguments
