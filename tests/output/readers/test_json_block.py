import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backend.core.step import ToolCallDelta
from backend.formats.dialects import JSON_CALLS, Reading
from backend.output.readers.build import object_block
from backend.output.readers.json_calls import CallBlockReader
from backend.output.readers.reader import (
    CallIds,
    CallLedger,
    ReaderContext,
    ReaderOutput,
    new_call_id,
)

TOOLS = {"f": {}, "get": {}}
OPENER, CLOSER = "<tool_call>", "</tool_call>"


def make_cursor(tools=TOOLS, *, in_thought=False):
    calls = CallLedger(tools, CallIds(lambda _name, number: f"id{number}"))
    context = ReaderContext(opener=OPENER, calls=calls, in_thought=in_thought)
    block = object_block(Reading(JSON_CALLS, end=CLOSER), JSON_CALLS)
    return CallBlockReader(context, block=block)


def test_a_call_leaves_when_a_value_in_its_arguments_has_begun():
    cursor = make_cursor()
    for piece in ('\n{"name": "get"', ', "arguments": {', '"a": '):
        assert cursor.feed(piece) == ReaderOutput()
    assert cursor.feed("[").deltas == (
        ToolCallDelta(0, "id0", "get"),
        ToolCallDelta(0, arguments='{"a": ['),
    )


def test_arguments_leave_as_they_are_written():
    cursor = make_cursor()
    cursor.feed('{"name": "f", "arguments": {"a": "')
    pieces = ["x", "y", "\\n", '", "b": [', "12]"]
    sent = [cursor.feed(piece).deltas for piece in pieces]
    assert [[delta.arguments for delta in deltas] for deltas in sent] == [[p] for p in pieces]


def test_the_last_brace_of_the_arguments_leaves_with_that_of_the_call():
    cursor = make_cursor()
    cursor.feed('{"name": "f", "arguments": {"a": [1]')
    assert cursor.feed("}") == ReaderOutput()
    assert cursor.is_mid_call
    assert cursor.feed("}") == ReaderOutput((ToolCallDelta(0, arguments="}"),))
    assert not cursor.is_mid_call


def test_the_rest_after_the_closer_is_given_back():
    output = make_cursor().feed('{"name": "f"}' + CLOSER + " bye")
    assert output.rest == " bye"
    assert output.deltas == (ToolCallDelta(0, "id0", "f"), ToolCallDelta(0, arguments="{}"))


@pytest.mark.parametrize(
    ("text", "rejected", "rest"),
    [
        ("\nword", "\n", "word"),
        (CLOSER, "", CLOSER),
        ('{"name": "fx"}', '{"name": "f', 'x"}'),
        ('{"name": "g"}', '{"name": "g', '"}'),
        ('{"name": 1}', '{"name": ', "1}"),
        ('{"name" 1}', '{"name" ', "1}"),
        ("{1}", "{", "1}"),
        ('{"na me": 1}', '{"na', ' me": 1}'),
        ('{"arguments": {"a": b}}', '{"arguments": {"a": ', "b}}"),
        ('{"arguments": {}} ', '{"arguments": {}', "} "),
        ("{}", "{", "}"),
        ("[]", "[", "]"),
    ],
)
def test_what_is_no_call_is_given_back_raw(text, rejected, rest):
    assert make_cursor().feed(text) == ReaderOutput((), OPENER + rejected, rest, is_damaged=True)


def test_what_breaks_off_in_the_arguments_stays_a_call_without_an_end():
    cursor = make_cursor()
    output = cursor.feed('{"name": "f", "arguments": {"a": [?}}')
    assert output.deltas[-1] == ToolCallDelta(0, arguments='{"a": [')
    assert (output.rejected, output.rest) == ("", "?}}")


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": 1,',
        '{"a": 1 , \n',
        '{"a": 1, ?',
        '{"a": 1,,',
        '{"a": [Tr',
        '{"a": [TrueNo',
        '{"a": [To]',
    ],
)
def test_what_waits_for_more_is_given_back_wherever_the_reply_is_cut(arguments):
    text = '{"name": "f", "arguments": ' + arguments
    for cut in range(len(text)):
        cursor = make_cursor()
        outputs = [cursor.feed(text[:cut])]
        outputs.append(cursor.feed(text[cut:]))
        if outputs[-1].rest is None:
            outputs.append(cursor.finish(truncated=False))
        sent = "".join(delta.arguments for output in outputs for delta in output.deltas)
        back = "".join(output.rejected + (output.rest or "") for output in outputs)
        assert sent + back == arguments


def test_a_quotation_in_a_thought_is_told_by_its_first_key():
    text = '{"arguments": {}, "name": "f"}'
    assert make_cursor(in_thought=True).feed(text).rejected == OPENER + '{"arguments"'
    assert make_cursor(in_thought=False).feed(text).deltas
    assert make_cursor(in_thought=True).feed('{"name": "f"}').deltas


def test_any_name_counts_when_the_names_are_unknown():
    assert make_cursor(None).feed('{"name": "x"}').deltas[0].name == "x"
    assert make_cursor(None).feed('{"name": ""}').rejected
    assert make_cursor(None).feed('{"name": "' + "x" * 1000).rejected


@given(st.text(min_size=1, max_size=3), st.booleans())
@example("\U0001f600", True)
def test_names_are_read_with_their_escapes(name, ensure_ascii):
    written = json.dumps({"name": name, "arguments": {}}, ensure_ascii=ensure_ascii) + CLOSER
    for chunks in ([written], written):
        cursor = make_cursor({name: {}})
        deltas = [delta for chunk in chunks for delta in cursor.feed(chunk).deltas]
        assert deltas[0].name == name


def test_half_a_code_point_is_no_name():
    assert make_cursor(None).feed('{"name": "\\ud83d"}').rejected
    assert make_cursor(None).feed('{"name": "\\q"}').rejected


@pytest.mark.parametrize(
    "value",
    [
        *('"no object"', '"[1]"', '"{1}"', "nul", "7", "[0]"),
        # Too much for Python's own reader of JSON.
        *(f"[{'1' * 5000}]", "[" * 5000 + "]" * 5000),
    ],
    ids=range(8),
)
def test_arguments_that_are_no_object_are_given_back(value):
    cursor = make_cursor()
    text = f'{{"name": "f", "arguments": {value}}}{CLOSER}'
    output = cursor.feed(text)
    assert not output.deltas
    assert output.rejected + output.rest == OPENER + text


@given(
    st.dictionaries(st.text(max_size=3), st.text(max_size=9) | st.integers() | st.none()),
    st.booleans(),
    st.booleans(),
)
def test_arguments_arrive_as_they_were_written(arguments, ensure_ascii, is_wrapped):
    written = json.dumps(arguments, ensure_ascii=ensure_ascii)
    value = json.dumps(written) if is_wrapped else written
    for text in ('"name": "f", "arguments": ' + value, '"parameters": ' + value + ', "name": "f"'):
        cursor = make_cursor()
        outputs = [cursor.feed(char) for char in "{" + text + "}" + CLOSER]
        pieces = [delta.arguments for output in outputs for delta in output.deltas]
        assert "".join(pieces) == written


def test_ids_are_unique():
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(call_id) == len("call_") + 24 for call_id in ids)
