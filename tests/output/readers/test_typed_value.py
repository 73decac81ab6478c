import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.output.readers.typed_values import STRING, UNKNOWN, ValueWriter, json_value

TYPES = st.frozensets(st.sampled_from(["string", "integer", "object", "boolean", "null"]))


def write(chunks, types):
    writer = ValueWriter(types)
    return "".join([*map(writer.write, chunks), writer.end()])


@pytest.mark.parametrize(
    ("raw", "types", "value"),
    [
        ("true", "string", '"true"'),
        ("007", "string", '"007"'),
        ("", "string", '""'),
        ("", "array", "[]"),
        ("\n", "object", "{}"),
        ("", "object null", "null"),
        ("", "integer", '""'),
        (" ", "string null", '" "'),
        (" ", "", '" "'),
        ("12", "integer", "12"),
        (" 12\n", "integer", "12"),
        ("12345678901234567890.0", "number", "12345678901234567890.0"),
        ("True", "boolean", "true"),
        ("FALSE", "boolean", "false"),
        ("None", "null", "null"),
        ("NULL", "integer null", "null"),
        ("['a', {'b': None}]", "array", '["a", {"b": null}]'),
        ("{'a': True}", "object", '{"a": true}'),
        ('{"a":1}', "object", '{"a":1}'),
        ("two", "integer", '"two"'),
        ("NaN", "number", '"NaN"'),
        ("{1, 2}", "array", '"{1, 2}"'),
        ("'\\d'", "array", '"\\\\d"'),
        ("12", "", '"12"'),
        ("true", "", '"true"'),
        ("[1]", "", "[1]"),
        ("{'a': 1}", "", '{"a": 1}'),
        ("12", "string integer", "12"),
        ("12", "string number", "12"),
        ("1.5", "string integer", '"1.5"'),
        ('"a"', "string null", '"\\"a\\""'),
        ("null", "string null", "null"),
        ("[" * 5000, "array", json.dumps("[" * 5000)),
        (chr(0xD83D), "string", '"\\ufffd"'),
        ("\N{REPLACEMENT CHARACTER}", "string", '"\\ufffd"'),
        (r'["\ud83d"]', "array", r'["\ufffd"]'),
        (r"['\ud83d']", "array", r'["\ufffd"]'),
        ("1e400", "number", '"1e400"'),
        ("[1e400]", "array", '"[1e400]"'),
        ("1" * 400, "integer", f'"{"1" * 400}"'),
    ],
)
def test_the_schema_decides_what_a_text_is(raw, types, value):
    assert json_value(raw, frozenset(types.split())) == value


def test_a_string_grows_and_all_else_waits():
    text = ValueWriter(STRING)
    assert [text.write("a"), text.write('"\n'), text.end()] == ['"a', '\\"\\n', '"']
    number = ValueWriter(frozenset({"integer"}))
    assert [number.write("1"), number.write("2"), number.end()] == ["", "", "12"]


@given(st.text(), TYPES)
def test_the_cut_makes_no_difference_and_it_is_json(raw, types):
    assert write(raw, types) == write([raw], types) == json_value(raw, types)
    json.loads(write(raw, types))


@given(st.text())
def test_a_string_keeps_every_character(raw):
    assert json.loads(write(raw, STRING)) == raw


@given(st.lists(st.integers() | st.text(max_size=3) | st.none(), max_size=4))
def test_an_array_is_found_in_json_and_in_python(value):
    for raw in (json.dumps(value), repr(value)):
        assert json.loads(json_value(raw, UNKNOWN)) == value
