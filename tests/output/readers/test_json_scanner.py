import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.output.readers.json_scanner import JsonScanner, JsonState

SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
SCALARS |= st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=10,
)
BROKEN = ['{"a" 1}', "{,}", "[,]", "[1,,]", '{"a": 1,,}', '{"a":]', '["a":]', "[1,}", '{"a": 1,]']
BROKEN += ["[01]", "[nul]", "[1 2]", "]", "[}", "{]", "[Nul]", "[Truer]", "[NaN]"]
TOKENS = ['"', "\\", "{", "}", "[", "]", ":", ",", " ", "\n", "0", "1", "-", ".", "e", "+"]
LONE_BACKSLASH = re.compile(r'(\\["\\/bfnrtu])|\\')
TOKENS += ["true", "false", "null", "tru", '"a"', '"a":', "\\u00e9", "\\n", "\\x", "é", "\x01"]


def escaped(text):
    """Double the backslashes that escape nothing."""
    return LONE_BACKSLASH.sub(lambda match: match[1] or r"\\", text)


def take(chunks):
    scanner = JsonScanner()
    taken = "".join(scanner.read_from(chunk)[0] for chunk in chunks)
    return taken, scanner.state


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_json_is_taken_as_it_was_written(value, ensure_ascii, indent):
    text = json.dumps([value], ensure_ascii=ensure_ascii, indent=indent)
    assert take([text]) == take(text) == (text, JsonState.COMPLETE)


@given(st.lists(st.sampled_from(TOKENS), max_size=12).map("".join), st.sampled_from("{["))
def test_it_is_json_when_the_standard_library_says_so(text, opener):
    text = escaped(opener + text)
    scanner = JsonScanner()
    taken, end = scanner.read_from(text)
    try:
        value, expected_end = json.JSONDecoder(strict=False).raw_decode(text)
    except ValueError:
        # A comma too much: the taken text has to be without it.
        assert scanner.state is not JsonState.COMPLETE or len(taken) < end
        assert scanner.state is not JsonState.COMPLETE or json.loads(taken) is not None
    else:
        assert scanner.state is JsonState.COMPLETE
        assert end == expected_end
        assert json.loads(taken) == value


@given(st.lists(st.sampled_from(TOKENS), max_size=12).map("".join))
def test_the_cut_makes_no_difference(text):
    assert take([text]) == take(text)


@given(st.lists(st.sampled_from(TOKENS), max_size=12).map("".join))
def test_what_was_taken_of_broken_json_ends_where_it_broke(text):
    scanner = JsonScanner()
    _, end = scanner.read_from("[" + text)
    if scanner.state is JsonState.MALFORMED:
        before = JsonScanner()
        before.read_from(("[" + text)[:end])
        assert before.state is JsonState.OPEN


def test_a_value_ends_before_what_follows_it():
    for text, end in [('{"a": 1} x', 8), ('"a" x', 3), ("12, 3", 2), ("null}", 4)]:
        scanner = JsonScanner()
        assert scanner.read_from(text) == (text[:end], end)
        assert scanner.state is JsonState.COMPLETE


def test_control_characters_in_strings_are_escaped():
    taken, _ = take('["a\n\t\x00b"]')
    assert taken == '["a\\n\\t\\u0000b"]'


def test_lone_backslashes_in_strings_are_escaped():
    assert take([r'["\d+\|\\ \n\u00e9"]'])[0] == r'["\\d+\\|\\ \n\u00e9"]'
    assert take(['["\\\t"]'])[0] == r'["\\\t"]'


@given(st.lists(st.sampled_from(TOKENS), max_size=12).map("".join))
def test_a_lone_backslash_is_taken_for_an_escaped_one(text):
    text = f"[{text} "
    assert take([text]) == take([escaped(text)])


@pytest.mark.parametrize("text", BROKEN)
def test_broken_json_is_told(text):
    assert take([text])[1] is JsonState.MALFORMED


@pytest.mark.parametrize(
    ("written", "taken"),
    [
        ('{"a": [1, 2 , ] ,\n}', '{"a": [1, 2  ] \n}'),
        ('{"a": "b",}', '{"a": "b"}'),
        ('[",]", {},]', '[",]", {}]'),
        ('{"a": True, "b": [None, False]}', '{"a": true, "b": [null, false]}'),
    ],
)
def test_commas_too_many_are_left_out_and_constants_of_python_are_read(written, taken):
    assert take([written]) == take(written) == (taken, JsonState.COMPLETE)


@pytest.mark.parametrize("text", ["[1, ?", "[1,\n,", "[1, Nope]", "[Nope]"])
def test_what_is_refuted_after_a_comma_is_not_lost(text):
    scanner = JsonScanner()
    taken, end = scanner.read_from(text)
    assert (taken, scanner.state) == (text[: end - scanner.pending], JsonState.MALFORMED)


@pytest.mark.parametrize(
    ("written", "taken"),
    [
        (r'["\ud83d\ude00"]', r'["\ud83d\ude00"]'),
        (r'["\ud83d"]', r'["\ufffd"]'),
        (r'["\ude00 a"]', r'["\ufffd a"]'),
        (r'["\ud83d\n\ud83dx"]', r'["\ufffd\n\ufffdx"]'),
        (r'["\ud83d\ud83d\ude00"]', r'["\ufffd\ud83d\ude00"]'),
        (r'["\ud83d\u0041\ude00\ude00"]', r'["\ufffd\u0041\ufffd\ufffd"]'),
        (r'{"\ud83d": 1}', r'{"\ufffd": 1}'),
        (r'["\ud83d\q"]', r'["\ufffd\\q"]'),
    ],
)
def test_half_a_surrogate_pair_is_a_replacement_character(written, taken):
    assert take([written]) == take(written) == (taken, JsonState.COMPLETE)
    json.dumps(json.loads(taken), ensure_ascii=False).encode()


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1" * 400, "0.1e999"])
def test_a_number_that_no_float_holds_is_malformed(number):
    assert take([f"[{number}]"])[1] is take(f"[{number}]")[1] is JsonState.MALFORMED


def test_depth_costs_no_stack():
    deep = "[" * 50_000 + "]" * 50_000
    assert take([deep]) == (deep, JsonState.COMPLETE)
