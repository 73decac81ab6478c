import json

import pytest

from backend.config import RequestDefaults
from backend.core.prompt import MEDIA_MARKER, Message, ToolCall
from backend.errors import InvalidRequestError
from backend.pb import backend_pb2 as pb
from backend.rpc.parsing.message_fields import in_order_of_calls, messages, template_options


def read(*conversation):
    return messages(pb.PredictOptions(Messages=conversation))


def test_every_part_of_a_message_is_taken_over():
    call = {"index": 0, "id": "c1", "type": "function"}
    call["function"] = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert read(
        pb.Message(role="assistant", reasoning_content="hm", tool_calls=json.dumps([call])),
        pb.Message(role="tool", content="3 C", name="get_weather", tool_call_id="c1"),
    ) == (
        Message(
            role="assistant",
            reasoning_content="hm",
            tool_calls=(ToolCall(call_id="c1", name="get_weather", arguments='{"city": "Oslo"}'),),
        ),
        Message(role="tool", content="3 C", name="get_weather", tool_call_id="c1"),
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ({"ö": 1}, '{"ö": 1}'),
        ("", "{}"),
        (None, "{}"),
        ({}, "{}"),
        ("not json", "not json"),
        (r'{"a": "\ud83d b"}', r'{"a": "\ufffd b"}'),
        (r'{"a": "\uDE00\ud83d"}', r'{"a": "\ufffd\ufffd"}'),
        (r'{"a": "\ud83d\ude00"}', r'{"a": "\ud83d\ude00"}'),
        (r'{"a": "\\ud83d"}', r'{"a": "\\ud83d"}'),
        ({"a": "\ud83d b"}, '{"a": "\ufffd b"}'),
    ],
)
def test_arguments_arrive_as_text_or_as_an_object(arguments, text):
    calls = json.dumps([{"function": {"name": "f", "arguments": arguments}}])
    (message,) = read(pb.Message(role="assistant", tool_calls=calls))
    assert message.tool_calls == (ToolCall(call_id="", name="f", arguments=text),)


def test_the_input_of_a_custom_tool_is_its_arguments():
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    (message,) = read(pb.Message(role="assistant", tool_calls=json.dumps([call])))
    assert message.tool_calls == (ToolCall(call_id="c", name="patch", arguments="*** Begin"),)


@pytest.mark.parametrize("calls", ["", "null", "[]"])
def test_no_tool_calls_are_no_tool_calls(calls):
    (message,) = read(pb.Message(role="assistant", tool_calls=calls))
    assert message.tool_calls == ()


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("{", "Messages[0].tool_calls: is not valid JSON"),
        ("{}", "Messages[0].tool_calls: must be a JSON array, not an object"),
        ("[null]", "Messages[0].tool_calls[0]: must be a JSON object, not null"),
        ('[{"function": {}}]', "Messages[0].tool_calls[0].function.name: must be text, not null"),
    ],
)
def test_malformed_tool_calls_are_refused_by_the_place(calls, message):
    with pytest.raises(InvalidRequestError) as caught:
        read(pb.Message(role="assistant", tool_calls=calls))
    assert str(caught.value).startswith(message)


ON, OFF, NO_EFFORT = (
    {"enable_thinking": True},
    {"enable_thinking": False},
    {"reasoning_effort": "none"},
)
OFF_WORD = {"enable_thinking": "false"}


def kwargs(**values):
    return {"chat_template_kwargs": json.dumps(values)}


THINKING, QUIET = RequestDefaults(enable_thinking=True), RequestDefaults()
SHORT = RequestDefaults(thinking_budget=64)


@pytest.mark.parametrize(
    ("tuning", "metadata", "options"),
    [
        (QUIET, {}, {}),
        (QUIET, {"enable_thinking": "true"}, {"enable_thinking": True}),
        (QUIET, {"enable_thinking": "false"}, {"enable_thinking": False}),
        (THINKING, {}, {"enable_thinking": True}),
        (THINKING, {"enable_thinking": "false"}, {"enable_thinking": False}),
        (
            THINKING,
            {"chat_template_kwargs": '{"enable_thinking": false}'},
            {"enable_thinking": False},
        ),
        (QUIET, {"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        (QUIET, {"reasoning_effort": "minimal"}, {"reasoning_effort": "minimal"}),
        (QUIET, {"reasoning_effort": "none"}, {"reasoning_effort": "none", **OFF}),
        (THINKING, {"reasoning_effort": "None"}, {"reasoning_effort": "None", **OFF}),
        (QUIET, {"reasoning_effort": "none", "enable_thinking": "true"}, ON),
        (THINKING, kwargs(reasoning_effort="none"), {"reasoning_effort": "none", **OFF}),
        (QUIET, {**kwargs(enable_thinking=True), "reasoning_effort": "none"}, {**OFF} | NO_EFFORT),
        (QUIET, {**kwargs(reasoning_effort="none"), "enable_thinking": "true"}, ON),
        (QUIET, kwargs(thinking={"type": "disabled"}), {"thinking": False, **OFF}),
        (QUIET, kwargs(thinking={"type": "adaptive"}), {"thinking": {"type": "adaptive"}}),
        (QUIET, {**kwargs(thinking=False), "enable_thinking": "true"}, {"thinking": True, **ON}),
        (THINKING, {"thinking": '{"type": "disabled"}'}, OFF),
        (QUIET, {"thinking": '{"type": "enabled", "budget_tokens": 5}'}, ON),
        (QUIET, {"thinking": "{"}, {}),
        (QUIET, {"thinking": "deep"}, {}),
        (THINKING, kwargs(enable_thinking=None), ON),
        (QUIET, kwargs(enable_thinking=None), {}),
        (QUIET, kwargs(enable_thinking="auto"), {"enable_thinking": "auto"}),
        (SHORT, OFF_WORD, {"thinking_budget": 0, **OFF}),
        (QUIET, {"chat_template_kwargs": '{"x": [1, null]}'}, {"x": [1, None]}),
        (
            QUIET,
            {"chat_template_kwargs": '{"enable_thinking": true}', "enable_thinking": "false"},
            {"enable_thinking": False},
        ),
        (QUIET, {"chat_template_kwargs": "", "enable_thinking": "", "mcp": "x"}, {}),
        (QUIET, {"thinking_budget": " 512 "}, {"thinking_budget": 512}),
        (QUIET, {"thinking_budget": ""}, {}),
        (SHORT, {}, {"thinking_budget": 64}),
        (SHORT, {"thinking_budget": "32"}, {"thinking_budget": 32}),
        (
            THINKING,
            {"thinking_budget": "0", "enable_thinking": "true"},
            {"thinking_budget": 0, "enable_thinking": False},
        ),
    ],
)
def test_template_options_are_layered(tuning, metadata, options):
    assert template_options(metadata, tuning) == options


@pytest.mark.parametrize("word", ["false", "False", " FALSE ", "0", "no", "off", "disabled"])
def test_words_switch_thinking_off(word):
    assert template_options({"enable_thinking": word}, THINKING) == OFF
    assert template_options({"thinking": word}, THINKING) == OFF
    assert template_options(kwargs(enable_thinking=word), THINKING) == OFF


@pytest.mark.parametrize("value", [True, 1, "true", "True", "1", "yes", "on", "enabled"])
def test_words_switch_thinking_on(value):
    assert template_options({"enable_thinking": str(value)}, QUIET) == ON
    assert template_options(kwargs(enable_thinking=value), QUIET) == ON


def test_zero_switches_thinking_off():
    assert template_options(kwargs(enable_thinking=0), THINKING) == OFF


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"enable_thinking": "maybe"}, 'Metadata["enable_thinking"]: must be true or false'),
        ({"thinking_budget": "-1"}, 'Metadata["thinking_budget"]: must be a number of tokens'),
        ({"thinking_budget": "much"}, 'Metadata["thinking_budget"]: must be a number of tokens'),
        ({"chat_template_kwargs": "{"}, 'Metadata["chat_template_kwargs"]: is not valid JSON'),
        ({"chat_template_kwargs": "[]"}, 'Metadata["chat_template_kwargs"]: must be a JSON object'),
    ],
)
def test_malformed_metadata_is_refused_by_its_key(metadata, message):
    with pytest.raises(InvalidRequestError) as caught:
        template_options(metadata, QUIET)
    assert str(caught.value).startswith(message)


CALLS = Message(
    role="assistant",
    tool_calls=tuple(ToolCall(call_id=each, name="f", arguments="{}") for each in "abc"),
)


def result(call_id, content="", role="tool"):
    return Message(role=role, content=content or f"of {call_id}", tool_call_id=call_id)


def test_results_have_the_order_of_the_calls_of_their_turn():
    question = Message(role="user", content="Now?")
    sent = (question, CALLS, result("c"), result("a", role="function"), result("b"), question)
    answered = (question, CALLS, result("a", role="function"), result("b"), result("c"), question)
    assert in_order_of_calls(sent) == answered
    assert in_order_of_calls([*sent, CALLS, result("b"), result("a")]) == (
        *answered,
        CALLS,
        result("a"),
        result("b"),
    )


@pytest.mark.parametrize(
    "results",
    [
        (result("b"), result("")),
        (result("b"), result("x"), result("a")),
        (result("b", f"see {MEDIA_MARKER}"), result("a", f"see {MEDIA_MARKER}")),
        (Message(role="system", content="Hurry."), result("b"), result("a")),
    ],
    ids=["without an id", "of another call", "marked media", "after a note"],
)
def test_results_of_unknown_places_stay_where_they_are(results):
    assert in_order_of_calls([CALLS, *results]) == (CALLS, *results)
