import ast
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.output.readers.literal_values import read_escape
from backend.output.readers.patterns import UNDECIDED


def read(text):
    """Read a text as long as escapes go, and take other characters as they are."""
    read_text, position = "", 0
    while position < len(text):
        meaning, end = read_escape(text, position) if text[position] == "\\" else (None, 0)
        read_text += text[position] if meaning is None else meaning
        position = position + 1 if meaning is None else end
        assert end >= 0
    return read_text


@given(st.text("\\nxuU0123789abfr'\"\n ", max_size=20))
def test_escapes_mean_what_they_mean_in_python(text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = ast.literal_eval(f'"""{text} """')
        except SyntaxError:
            return
    assert read(text + " ") == expected


def test_a_surrogate_pair_is_one_character_as_in_json():
    assert read(r"\ud83d\ude00!") == "\N{GRINNING FACE}!"
    assert read(r"\ud83d\n!") == "\ud83d\n!"
    for begun in ("", "\\", r"\u", r"\ude", r"\ude0"):
        assert read_escape(r"\ud83d" + begun, 0) == ("", UNDECIDED)


@pytest.mark.parametrize("text", ["\\", "\\x", "\\x4", "\\u00e", "\\U0001f95", "\\1", "\\12"])
def test_half_an_escape_waits(text):
    assert read_escape(text, 0) == ("", UNDECIDED)


@pytest.mark.parametrize("text", ["\\q", "\\xg1", "\\u12 4", "\\U00110000", "\\9"])
def test_a_backslash_that_escapes_nothing_is_a_backslash(text):
    assert read_escape(text + " ", 0) == ("\\", 1)
