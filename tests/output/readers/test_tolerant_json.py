"""JSON with models' errors: sound parts stay as written, so that a stream can go on with them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.output.readers.json_scanner import JsonScanner, JsonState, call_ends
from backend.output.readers.tolerant_json import NotJsonError, read_json
from backend.output.readers.typed_values import continued

CASES = {
    '{"a": "x" /* c */}': {"a": "x"},
    '{"a": "x", // c\n "b": 1 # d\n}': {"a": "x", "b": 1},
    '{"a": 1; "b": 2}': {"a": 1, "b": 2},
    '{"a": "x"; "b": 2}': {"a": "x", "b": 2},
    '{"a": 1 "b": 2}': {"a": 1, "b": 2},
    '{"a": "x" "b": 2}': {"a": "x", "b": 2},
    '{"a" = "x", b => 2}': {"a": "x", "b": 2},
    '{"a="x", "b": 2}': {"a": "x", "b": 2},
    '{"a":"x"]}': {"a": "x"},
    '{"a":"x"], "b": 1}': {"a": "x", "b": 1},
    '{"a": ["x"}, "b": 1}': {"a": ["x"], "b": 1},
    '{"a": {"b": ["x"}}': {"a": {"b": ["x"]}},
    '{"a": [1, 2)': {"a": [1, 2]},
    '{"a": "x"': {"a": "x"},
    '{"a": "x}': {"a": "x"},
    '{"a": {"b": "x}}': {"a": {"b": "x"}},
    '{"a": "f() {}}': {"a": "f() {}"},
    '{"a": "x\\u00"}': {"a": "x\\u00"},
    '{"a": "x\\ud83d\\u12"}': {"a": "x\ufffd\\u12"},
    '{"a": "say "hi", ok", "b": 1}': {"a": 'say "hi", ok', "b": 1},
    '{"a": "x = "y";"}': {"a": 'x = "y";'},
    '{"a": NaN, "b": [undefined, -Infinity]}': {"a": None, "b": [None, None]},
    "{'a': 'it\\'s', 'b': None}": {"a": "it's", "b": None},
    '{"a": "http://x.org/#y", "b": "/* no */"}': {"a": "http://x.org/#y", "b": "/* no */"},
    '{,"a": 1,, "b": [1,,2,],}': {"a": 1, "b": [1, 2]},
    '{"a": "{"b": "c"}", "d": 1}': {"a": '{"b": "c"}', "d": 1},
    '{"a": "f("x")\nf("y")\n"}': {"a": 'f("x")\nf("y")\n'},
    '{"a": 1/3, "b": [2 * 3]}': {"a": "1/3", "b": ["2 * 3"]},
}


def streamed(text):
    """Return the part of a text that a stream sends before it ends or breaks."""
    scanner = JsonScanner(call_ends(("</tool_call>",)))
    return "".join(scanner.read_from(char)[0] for char in text if scanner.state is JsonState.OPEN)


@pytest.mark.parametrize("text", CASES)
def test_it_is_read_as_it_was_meant(text):
    found = read_json(text, 0)
    assert json.loads(found.text) == CASES[text]
    assert {key: json.loads(value) for key, value in found.members.items()} == CASES[text]


@pytest.mark.parametrize("text", CASES)
def test_it_begins_with_what_was_sent(text):
    rest = continued(streamed(text), read_json(text, 0).text)
    assert rest is not None
    assert json.loads(streamed(text) + rest) == CASES[text]


@pytest.mark.parametrize(
    "text",
    ['{"a": "x', '{"a": "f() {}', '{"a": "x, "b": 1}', '{"a" 1}', '{"a": "{"b": 1} x"}', "{a}"],
)
def test_what_could_be_two_things_is_neither(text):
    with pytest.raises(NotJsonError):
        read_json(text, 0)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text("ab {}[],:/#;\\\n'é", max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text("ab", min_size=1, max_size=3), VALUES), st.sampled_from([None, 1]))
def test_sound_json_stays_as_it_was_written(value, indent):
    text = json.dumps(value, indent=indent)
    found = read_json(text, 0)
    assert (found.text, found.end, found.reasons) == (text, len(text), ())


@given(st.dictionaries(st.text("ab", min_size=1, max_size=3), VALUES), st.data())
def test_of_damaged_json_nothing_is_invented_silently(value, data):
    text = json.dumps(value)
    place = data.draw(st.integers(0, len(text) - 1))
    damaged = (
        text[:place]
        + data.draw(st.sampled_from(["", '"', ";", "]", "}", "/* c */"]))
        + text[place + 1 :]
    )
    try:
        found = read_json(damaged, 0)
    except NotJsonError:
        return
    assert json.loads(found.text) is not None or damaged.startswith("null")


@pytest.mark.parametrize("text", ['["a}</tool_call>b"]', '["a</tool_call> "]', '["]}</to"]'])
def test_an_end_inside_a_string_is_text_if_the_string_goes_on(text):
    assert streamed(text) == text


@pytest.mark.parametrize("end", ["}}", "}}\n</tool_call>", "</tool_call>\n", "]} </tool_c"])
def test_a_possible_end_inside_a_string_is_held_back(end):
    assert streamed('{"a": "x' + end) == '{"a": "x'
