import json
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backend.core.step import ToolCallDelta
from backend.formats.dialects import ARGUMENTS, KEY, NAME, TYPE, VALUE, Reading, Tags
from backend.output.readers.build import tagged_dialect
from backend.output.readers.reader import CallIds, CallLedger, ReaderContext, ReaderOutput
from backend.output.readers.tagged_calls import TaggedReader

TAGS = Tags(
    call=('<call name="', NAME, '">', ARGUMENTS, "</call>"),
    parameter=('<arg name="', KEY, '" string="', TYPE, '">', VALUE, "</arg>"),
    types={"string": "true", "integer": "false"},
)


def dialect_of(tags=TAGS, end="</calls>"):
    return tagged_dialect(Reading(tags, end=end), tags)


DIALECT = dialect_of()
PROPERTIES = {"a": {"type": "string"}, "b": {"type": "string"}, "n": {"type": "integer"}}
TOOLS = {"f": {"properties": PROPERTIES}}
BEGIN = '<call name="f"><arg name="a">'
END = "</arg></call></calls>"
HOSTILE = ["</arg>", "</call>", "</calls>", '<arg name="b">', '<arg name="x">', "<", "\n", "é", '"']


def make_cursor(opener="<calls>", dialect=DIALECT):
    calls = CallLedger(TOOLS, CallIds(lambda _name, number: f"id{number}"))
    return TaggedReader(
        ReaderContext(opener=opener, calls=calls, in_thought=False), dialect=dialect
    )


def arguments(chunks, opener="<calls>", dialect=DIALECT):
    cursor = make_cursor(opener, dialect)
    outputs = [cursor.feed(chunk) for chunk in chunks] + [cursor.finish(truncated=False)]
    return "".join(delta.arguments for output in outputs for delta in output.deltas)


def test_a_string_leaves_as_it_is_written():
    cursor = make_cursor()
    assert cursor.feed('<call name="f">') == ReaderOutput()
    assert cursor.feed('<arg name="a">').deltas == (
        ToolCallDelta(0, "id0", "f"),
        ToolCallDelta(0, arguments='{"a": '),
    )
    pieces = ["x", "y<", "z", "</ar", "g>", "\n", '<arg name="n">', "1", "2"]
    sent = ["".join(d.arguments for d in cursor.feed(piece).deltas) for piece in pieces]
    assert sent == ['"x', "y", "<z", "", "", "", '", "n": ', "", ""]
    assert cursor.is_mid_call
    assert [delta.arguments for delta in cursor.feed("</arg></call>").deltas] == ["12", "}"]
    assert cursor.feed("</calls> bye").rest == " bye"
    assert not cursor.is_mid_call


def test_the_end_of_a_call_leaves_when_it_is_certain():
    cursor = make_cursor()
    cursor.feed(BEGIN + "x</arg></call>")
    assert cursor.is_mid_call
    assert "".join(d.arguments for d in cursor.feed("</calls>").deltas) == '"}'


def test_types_may_stand_in_tags_but_a_schema_overrules_them():
    text = '<call name="f"><arg name="x" string="false">12</arg><arg name="y" string="true">12'
    assert arguments([text + END]) == '{"x": 12, "y": "12"}'
    text = '<call name="f"><arg name="a" string="false">12</arg><arg name="n" string="true">12'
    assert arguments([text + END]) == '{"a": "12", "n": 12}'


def test_nothing_is_a_tag_in_a_value_between_marks():
    dialect = replace(DIALECT, verbatim=("<![", "]]"))
    value = '</arg><arg name="b"></call></calls>]] <!['
    assert arguments([f"{BEGIN}<![{value}]]{END}"], dialect=dialect) == json.dumps({"a": value})
    assert arguments([f"{BEGIN}<!x{END}"], dialect=dialect) == '{"a": "<!x"}'


def test_an_end_may_be_named_after_its_tag():
    tags = Tags(
        call=TAGS.call,
        parameter=("<", KEY, ">", VALUE, "</", KEY, ">"),
        mark="#",
        requires_ends=True,
    )
    dialect = dialect_of(tags)
    text = '<call name="f"><a>x</b>\n<b></a><b>y</b></call></calls>'
    assert arguments([text], dialect=dialect) == '{"a": "x</b>\\n<b>", "b": "y"}'


@pytest.mark.parametrize("text", ["oops", "<call>", '<call name="g">', "</calls>"])
def test_what_is_no_call_is_given_back(text):
    output = make_cursor().feed(text)
    assert not output.deltas
    assert output.rejected + (output.rest or "") == "<calls>" + text
    assert output.rejected


def test_a_call_that_opens_itself_is_given_back_with_its_opener():
    output = make_cursor('<call name="').feed('g">')
    assert output == ReaderOutput(rejected='<call name="', rest='g">', is_damaged=True)


def test_a_long_value_costs_no_more_than_its_length():
    value = "</arg> x" * 20_000
    assert json.loads(arguments(BEGIN + value + END)) == {"a": value}


@given(st.lists(st.sampled_from([*HOSTILE, "word"]), max_size=12).map("".join))
def test_the_cut_makes_no_difference(value):
    text = BEGIN + value + END
    outcomes = []
    for chunks in ([text], text):
        cursor, rejected, rest, deltas = make_cursor(), "", None, []
        for chunk in chunks:
            if rest is not None:
                rest += chunk
                continue
            output = cursor.feed(chunk)
            deltas += output.deltas
            rejected, rest = rejected + output.rejected, output.rest
        outcomes.append(("".join(d.arguments for d in deltas), rejected, rest))
    assert outcomes[0] == outcomes[1]


def test_a_closer_too_many_is_no_part_of_a_value():
    assert json.loads(arguments(f"{BEGIN}x</arg>\n{END}")) == {"a": "x"}
    assert json.loads(arguments(f"{BEGIN}x</arg></call></call></calls>")) == {"a": "x"}


@given(st.text(), st.text())
@example("\0a", "\0")
def test_values_arrive_as_they_were_written(first, second):
    text = f'{BEGIN}{first}</arg>\n<arg name="b">{second}{END}'
    assert json.loads(arguments(text)) == {"a": first, "b": second}
