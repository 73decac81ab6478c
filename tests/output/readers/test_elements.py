import json
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.output.readers.typed_values import UNKNOWN, ParameterTypes, read_elements

STEP = {"type": "object", "properties": {"hours": {"type": "number"}, "what": {"type": "string"}}}
SCHEMA = {
    "properties": {
        "steps": {"type": "array", "items": {"$ref": "#/$defs/step"}},
        "one": {"$ref": "#/$defs/step"},
    },
    "$defs": {"step": STEP},
}
TYPES = ParameterTypes(SCHEMA)


def read(raw, name="other"):
    return json.loads(read_elements(raw, TYPES.of(name), mark="!", parts=TYPES.inside(name)))


@pytest.mark.parametrize(
    ("raw", "name", "value"),
    [
        ("!<hours>1.5!</hours>!<what>2!</what>", "one", {"hours": 1.5, "what": "2"}),
        ("!<item>!<hours>1!</hours>!</item>", "steps", [{"hours": 1}]),
        ("!<item>a!</item>\n!<item>b!</item>", "other", ["a", "b"]),
        ("!<a>1!</a>!<a>2!</a>", "other", {"a": ["1", "2"]}),
        ("so !<a>1!</a>", "other", {"$text": "so", "a": "1"}),
        ("<a>1</a>", "other", "<a>1</a>"),
        ("!<a>1", "other", "!<a>1"),
        ("!<a>1!</b>", "other", "!<a>1!</b>"),
        ('{"a": 1}', "one", {"a": 1}),
    ],
)
def test_elements_are_values(raw, name, value):
    assert read(raw, name) == value


def test_elements_that_nest_too_deep_are_text():
    raw = "!<a>" * 40 + "!</a>" * 40
    assert "!<a>" in json.dumps(read(raw))


@given(st.lists(st.sampled_from(["!<a>", "!</a>", "!<item>", "!</item>", "x", "\n"])))
def test_any_text_is_some_value(pieces):
    convert = partial(read_elements, mark="!", parts=ParameterTypes({}))
    json.loads(convert("".join(pieces), UNKNOWN))
