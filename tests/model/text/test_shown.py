"""Which texts of a conversation a prompt lacks."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.model.text.renderer import (
    _MAX_FAR_TEXTS,
    Text,
    missing,
    said,
    stand_in,
    with_stand_ins,
)


def kept(*texts: str) -> list[Text]:
    return [Text(place, text) for place, text in enumerate(texts)]


WORDS = st.lists(st.text('abc \n"\\', min_size=1).filter(str.strip), max_size=20)


@given(words=WORDS, between=st.text("<>|x", max_size=9))
def test_texts_in_order_are_found_whatever_is_between_them(words, between):
    assert missing(kept(*(word.strip() for word in words)), between.join(words)) == []


@given(words=WORDS)
def test_texts_in_another_order_are_found(words):
    assert missing(kept(*(word.strip() for word in words)), "|".join(reversed(words))) == []


@given(words=WORDS, place=st.integers(0, 20))
def test_a_text_that_is_not_there_is_missed(words, place):
    texts = [word.strip() for word in words]
    texts.insert(place, "Zürich")
    place = texts.index("Zürich")
    assert missing(kept(*texts), "|".join(words)) == [Text(place, "Zürich")]


@pytest.mark.parametrize("written", ['a \\"b\\"\\nü', 'a \\"b\\"\\n\\u00fc'])
def test_a_text_written_as_json_is_there(written):
    assert missing(kept('a "b"\nü'), f'{{"result": "{written}"}}') == []


def test_what_may_be_dropped_is_not_missed():
    turns = [{"role": "assistant", "content": "gone"}, {"role": "user", "content": " \n"}]
    assert missing(said(turns), "prompt") == []


def test_texts_of_parts_are_texts_too():
    parts = [{"type": "image"}, {"type": "text", "text": " text "}]
    assert said([{"role": "user", "content": parts}]) == [Text(0, "text")]
    replaced = with_stand_ins([{"role": "user", "content": parts}], kept("text"))
    assert replaced[0]["content"] == [
        {"type": "image"},
        {"type": "text", "text": f" {stand_in(Text(0, 'text'))} "},
    ]


def test_a_long_history_of_texts_that_are_not_there_takes_little_time():
    texts = kept(*(f"text {n}" for n in range(5_000)))
    start = time.perf_counter()
    assert len(missing(texts, "x" * 200_000)) == _MAX_FAR_TEXTS
    assert time.perf_counter() - start < 10
