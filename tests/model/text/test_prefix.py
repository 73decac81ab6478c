from collections.abc import Sequence

import pytest
from chat_tokenizers import byte_level, sentencepiece
from hypothesis import example, given
from hypothesis import strategies as st

from backend.model.text.prefix import LOOK_AHEAD_CHARS, TokenizedText, common_length
from backend.model.text.tokenizer import Tokenizer

SPECIAL = ("<|turn|>", "<|turn|>!", "<|end|>")
TOKENIZERS = {
    "byte-level": byte_level(SPECIAL),
    "sentencepiece": sentencepiece(SPECIAL),
    "no special tokens": byte_level(()),
}
TEXT = st.lists(
    st.sampled_from([*SPECIAL, "<|turn", "|>", "!", " ", "\n", "hello", "he", "ll", "é", "你好"]),
    max_size=12,
).map("".join)


class Recorder:
    """A tokenizer that keeps the texts it was given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.special_texts = tokenizer.special_texts
        self.encoded: list[str] = []
        self._tokenizer = tokenizer

    def encode(self, text: str, *, adds_special: bool) -> list[int]:
        self.encoded.append(text)
        return self._tokenizer.encode(text, adds_special=adds_special)


def tokenized(text: str, tokenizer: Tokenizer) -> TokenizedText:
    return TokenizedText(text, tokenizer.encode(text, adds_special=False), tokenizer)


def naive_length(one: Sequence[object], other: Sequence[object]) -> int:
    pairs = list(zip(one, other, strict=False))
    return next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))


@given(one=st.text("ab", max_size=20), other=st.text("ab", max_size=20))
def test_the_common_length_is_that_of_a_comparison_one_by_one(one: str, other: str):
    assert common_length(one, other) == naive_length(one, other)
    assert common_length(list(one), list(other)) == naive_length(one, other)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(start=TEXT, one=TEXT, other=TEXT)
@example(start="<|turn|>hello\n", one="hello", other="\nhello")
@example(start="hello<|turn|>", one="!hello", other="hello")
@example(start="<|turn|>hello<|end|> ", one="hello", other="he")
def test_shared_tokens_are_those_of_both_texts_tokenised_whole(
    name: str, start: str, one: str, other: str
):
    tokenizer = TOKENIZERS[name]
    whole = [tokenizer.encode(start + end, adds_special=False) for end in (one, other)]
    assert tokenized(start + one, tokenizer).shared_tokens(start + other) == naive_length(*whole)


def test_a_text_is_tokenised_from_the_last_shared_special_token():
    recorder = Recorder(TOKENIZERS["byte-level"])
    shared = "hello<|turn|>!" * 1000
    text = tokenized(shared + "<|turn|>hello", recorder)
    recorder.encoded.clear()
    assert text.shared_tokens(shared + "<|turn|>world" * 1000) > 2000
    assert recorder.encoded[0].startswith("<|turn|>world<|turn|>")
    assert len(recorder.encoded[0]) == len("<|turn|>") + LOOK_AHEAD_CHARS


def test_ids_that_do_not_tell_the_special_tokens_of_the_text_are_not_relied_on():
    recorder = Recorder(TOKENIZERS["byte-level"])
    ids = recorder.encode("hello hello", adds_special=False)
    turn = recorder.encode("<|turn|>", adds_special=False)
    text = TokenizedText("hello<|turn|> hello<|turn|>", [ids[0], *turn, *ids[1:]], recorder)
    recorder.encoded.clear()
    text.shared_tokens("hello<|turn|> hello<|end|>")
    assert recorder.encoded == ["hello<|turn|> hello<|end|>"]
