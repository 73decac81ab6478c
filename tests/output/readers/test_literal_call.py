import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.step import ToolCallDelta
from backend.formats import literal as gemma4
from backend.formats import literal as pythonic
from backend.formats.dialects import Literals
from backend.output.readers.build import literal_dialect
from backend.output.readers.literal_calls import LiteralCallReader
from backend.output.readers.reader import CallIds, CallLedger, ReaderContext, ReaderOutput


def dialect_of(tool_format, opener):
    reading = next(
        reading
        for reading in tool_format.readings
        if isinstance(reading.dialect, Literals) and opener in (reading.openers or [opener])
    )
    return literal_dialect(reading, reading.dialect)


BARE_LIST = dialect_of(pythonic.PYTHONIC, "[")
GEMMA4 = dialect_of(gemma4.GEMMA4, gemma4.GEMMA4_OPENER)
GEMMA4_QUOTE = GEMMA4.syntax.quotes[0]
PROPERTIES = {"a": {"type": "string"}, "n": {"type": "integer"}, "any": {}}
TOOLS = {"f": {"properties": PROPERTIES}, "g": {}}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=8,
)


def make_cursor(dialect=BARE_LIST, opener="["):
    calls = CallLedger(TOOLS, CallIds(lambda _name, number: f"id{number}"))
    return LiteralCallReader(
        ReaderContext(opener=opener, calls=calls, in_thought=False), dialect=dialect
    )


def arguments(chunks, dialect=BARE_LIST, opener="["):
    cursor = make_cursor(dialect, opener)
    outputs = [cursor.feed(chunk) for chunk in chunks] + [cursor.finish(truncated=False)]
    return "".join(delta.arguments for output in outputs for delta in output.deltas)


def as_gemma(value):
    match value:
        case str():
            return f"{GEMMA4_QUOTE}{value}{GEMMA4_QUOTE}"
        case list():
            return f"[{','.join(map(as_gemma, value))}]"
        case dict():
            pairs = (f"{as_gemma(key)}:{as_gemma(item)}" for key, item in value.items())
            return f"{{{','.join(pairs)}}}"
    return json.dumps(value)


@given(VALUES)
def test_any_python_literal_is_read_as_python_reads_it(value):
    literal = repr(value)
    assert ast.literal_eval(literal) == value
    found = json.loads(arguments(f"f(any={literal})]"))
    assert found == json.loads(json.dumps({"any": value}))


@given(VALUES)
def test_any_value_between_markers_is_read_as_it_was_written(value):
    text = f"call:f{{any:{as_gemma(value)}}}<tool_call|>"
    found = json.loads(arguments(text, GEMMA4, "<|tool_call>"))
    assert found == json.loads(json.dumps({"any": value}))


@given(TEXTS, TEXTS, st.sampled_from(["'", '"', "'''", '"""']))
def test_a_raw_string_ends_at_its_last_quote(first, second, quote):
    text = (first + quote + second).replace("\\", "/")
    if text[-1:] == quote[0] or text[:1] == quote[0]:
        return
    if any(end in text.replace(" ", "") for end in (f"{quote},", f"{quote})")):
        return
    assert json.loads(arguments(f"f(a={quote}{text}{quote})]")) == {"a": text}


@pytest.mark.parametrize("bracket", [")", "}"])
def test_a_quote_before_a_comma_and_a_bracket_ends_a_string_only_with_the_call(bracket):
    q = GEMMA4_QUOTE
    inside = f"x{q},{bracket} y"
    text = f"call:f{{a:{q}{inside}{q}}}<tool_call|>"
    for chunks in ([text], text):
        assert json.loads(arguments(chunks, GEMMA4, "<|tool_call>")) == {"a": inside}
    text = f"call:f{{a:{q}x{q},{bracket}<tool_call|>"
    assert json.loads(arguments([text], GEMMA4, "<|tool_call>")) == {"a": "x"}


@pytest.mark.parametrize(
    ("dialect", "opener", "head"),
    [(BARE_LIST, "[", "f(a="), (GEMMA4, "<|tool_call>", "call:f{a:")],
    ids=["list", "block"],
)
def test_a_name_leaves_with_the_first_value(dialect, opener, head):
    cursor = make_cursor(dialect, opener)
    assert cursor.feed(head) == ReaderOutput()
    name, *arguments = cursor.feed("[").deltas
    assert name == ToolCallDelta(0, "id0", "f")
    assert "".join(delta.arguments for delta in arguments) == '{"a": ['


def test_values_leave_as_they_are_written():
    cursor = make_cursor()
    cursor.feed("f(a=")
    pieces = ['"', "x", "y\\", "n", "'", '"', ", ", "any", "=", "[", "1", "2", ",", " {'", "k", "'"]
    sent = ["".join(d.arguments for d in cursor.feed(piece).deltas) for piece in pieces]
    first = ["", '{"a": "x', "y", "\\n", "'", "", "", "", '"']
    # A brace and its first item wait for a colon: without one it is a set.
    assert sent == [*first, ', "any": [', "", "", "12", "", "", ""]
    assert "".join(d.arguments for d in cursor.feed(": 1}])]\n").deltas) == ', {"k": 1}]}'


def test_a_list_that_turns_out_to_be_a_link_is_given_back():
    cursor = make_cursor()
    assert cursor.feed("g()]") == ReaderOutput()
    assert cursor.feed("(x") == ReaderOutput(rejected="[g()", rest="](x", is_damaged=True)


@pytest.mark.parametrize("text", ["1, 2]", "x](y)", "fx(a=1)]", "f[0]]", "f(a)]", "f(1 + a)]", "]"])
def test_what_is_no_list_of_calls_is_given_back(text):
    cursor = make_cursor()
    output = cursor.feed(text)
    assert output.rejected + (output.rest or "") == "[" + text or output.deltas
    assert output.rejected


def test_a_long_value_costs_no_more_than_its_length():
    value = 'say "a", \\"b") ' * 4_000
    assert json.loads(arguments(f'f(a="{value}", n=1)]'))["n"] == 1
