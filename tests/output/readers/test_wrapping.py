"""Arguments in a wrapper that the schema does not know."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.output.readers.tolerant_json import Unwrapping, unwrapped
from backend.output.readers.typed_values import ParameterTypes

PROPERTIES = {"command": {"type": "string"}, "n": {}, "input": {}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["command"]}
LS = '{"command":  "ls"}'


def types(**others):
    return ParameterTypes({**SCHEMA, **others})


@pytest.mark.parametrize("key", ["arguments", "parameters", "args", "params", "kwargs"])
@pytest.mark.parametrize("form", ['{{"{}": {}}}', '{{ "{}" : {} }}', '{{"{}": {{"args": {}}}}}'])
def test_wrapped_arguments_are_taken_out_as_they_were_written(key, form):
    assert unwrapped(form.format(key, LS), types()) == LS


def test_wrapped_text_is_read_as_json():
    assert unwrapped(json.dumps({"arguments": LS}), types()) == LS
    assert json.loads(unwrapped(f'{{"args": {LS}, "n": 1}}', types())) == {"command": "ls", "n": 1}


@pytest.mark.parametrize(
    "text",
    [
        '{"input": {"command": "ls"}}',
        '{"arguments": {"other": 1}}',
        '{"arguments": "ls"}',
        '{"arguments": ["ls"]}',
        '{"arguments": {"command": "ls"}, "command": "pwd"}',
        '{"command": {"arguments": {"command": "ls"}}}',
        "{}",
    ],
)
def test_what_the_schema_knows_stays(text):
    assert unwrapped(text, types()) == text


def test_what_an_open_schema_allows_stays_if_nothing_is_missing():
    text = f'{{"args": {LS}}}'
    assert unwrapped(text, types(additionalProperties=True)) == LS
    assert unwrapped(text, types(additionalProperties=True, required=[])) == text
    assert unwrapped(text, ParameterTypes({})) == text


ARGUMENTS = st.dictionaries(
    st.sampled_from(["command", "arguments", "args", "n", "x"]),
    st.text(max_size=3) | st.just({"command": "ls"}) | st.just(LS),
    max_size=3,
)


@given(ARGUMENTS, st.integers(1, 7))
def test_the_cut_makes_no_difference(value, size):
    text = json.dumps(value)
    passing = Unwrapping(types())
    pieces = [passing.unwrap(text[start : start + size]) for start in range(0, len(text), size)]
    assert "".join(pieces) == unwrapped(text, types())
