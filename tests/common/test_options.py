from dataclasses import dataclass

import pytest

from common.options import OptionField, option_fields, split_entry


@dataclass
class Knobs:
    slots: int = 4
    threshold: float = 0.1
    name: str | None = None
    batching: bool = True
    limit: int | None = None


@dataclass
class Board:
    knobs: Knobs
    title: str = ""


def test_fields_follow_the_annotations():
    assert option_fields(Knobs) == {
        "slots": OptionField(int),
        "threshold": OptionField(float),
        "name": OptionField(str, is_optional=True),
        "batching": OptionField(bool),
        "limit": OptionField(int, is_optional=True),
    }


def test_a_group_of_options_adds_its_own():
    assert option_fields(Board) == {**option_fields(Knobs), "title": OptionField(str)}


@pytest.mark.parametrize(
    ("entry", "pair"),
    [
        ("slots:8", ("slots", "8")),
        ("  slots : 8 ", ("slots", "8")),
        ("path:C:\\models:x", ("path", "C:\\models:x")),
        ("use_jinja", ("use_jinja", None)),
        ("name:", ("name", "")),
    ],
)
def test_an_entry_splits_at_its_first_colon(entry, pair):
    assert split_entry(entry) == pair


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (int, "8", 8),
        (int, "-1", -1),
        (float, "0.5", 0.5),
        (float, "1", 1.0),
        (bool, "true", True),
        (bool, "Off", False),
        (bool, "1", True),
        (str, "qwen", "qwen"),
    ],
)
def test_text_is_read_by_type(kind, text, value):
    read = OptionField(kind).from_text(text)
    assert read == value
    assert type(read) is kind


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (int, "eight", "an integer"),
        (int, "8.5", "an integer"),
        (float, "nan", "a finite number"),
        (float, "inf", "a finite number"),
        (bool, "maybe", "true or false"),
        (int, "", "an integer"),
    ],
)
def test_text_of_another_type_is_refused(kind, text, expected):
    with pytest.raises(ValueError, match=f"expected {expected}"):
        OptionField(kind).from_text(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (OptionField(int), 8),
        (OptionField(float), 2),
        (OptionField(str, is_optional=True), None),
        (OptionField(bool), False),
    ],
)
def test_json_of_the_right_type_is_taken(field, value):
    assert field.from_json(value) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (OptionField(int), "8"),
        (OptionField(int), True),
        (OptionField(int), 8.0),
        (OptionField(int), None),
        (OptionField(bool), 1),
        (OptionField(str), ["a"]),
        (OptionField(float), 10**400),
    ],
)
def test_json_of_another_type_is_refused(field, value):
    with pytest.raises(ValueError, match="expected"):
        field.from_json(value)
