"""Long texts are tokenised in parts: their tokens are those of the whole."""

import threading

import pytest
from chat_tokenizers import byte_level, sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from backend.model.text.reading import PIECE_CHARS, Joint, divide, find_joint
from backend.model.text.tokenizer import Tokenizer
from common.rpc import AbandonedError, enter_work

SPECIAL = ["<|im_end|>", "<s>"]
# The pre-tokenizer of cl100k, which Llama 3 and Qwen have with small changes.
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = ["hello", "world", "it", "is", "Raining", "A", "don't", "x\ny", "in the town", "é", "你好"]
SIGNS = [
    "🙂",
    "12",
    ",",
    ".",
    "\n",
    "\n\n",
    "\t",
    " ",
    "  ",
    "   ",
    "<|im_end|>",
    "<s>",
    "-",
    "▁",
    "'s",
]
FRAGMENTS = st.sampled_from([*WORDS, *SIGNS])
TEXTS = st.lists(FRAGMENTS, max_size=80).map("".join) | st.lists(FRAGMENTS, max_size=80).map(
    " ".join
)


def with_regex():
    fast = FastTokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(CL100K), behavior="isolated")
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    fast.train_from_iterator(
        ["hello hello world is it raining\n\nin the town,, it is  so"], trainer
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast))


def with_words_that_hold_spaces():
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=60, show_progress=False)
    fast.train_from_iterator(["in the town in the town in the town it is it is"], trainer)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast))


MAKERS = {"byte level": lambda: byte_level(SPECIAL), "regex": with_regex}
MAKERS |= {"sentencepiece": lambda: sentencepiece(SPECIAL)}
TOKENIZERS = {name: make() for name, make in MAKERS.items()}


def encoder(tokenizer):
    return lambda text: tokenizer.encode(text, adds_special=False)


@pytest.mark.parametrize(
    ("name", "joint"),
    [("byte level", Joint.KEPT), ("regex", Joint.KEPT), ("sentencepiece", Joint.DROPPED)],
)
def test_a_tokenizer_that_puts_a_space_before_texts_gets_them_without_the_space(name, joint):
    tokenizer = TOKENIZERS[name]
    assert find_joint(encoder(tokenizer), tokenizer.pieces) is joint


def test_a_tokenizer_whose_tokens_hold_several_words_knows_no_safe_place():
    tokenizer = with_words_that_hold_spaces()
    assert any(b"n t" in piece for piece in tokenizer.pieces)
    assert find_joint(encoder(tokenizer), tokenizer.pieces) is Joint.NONE


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS, piece_chars=st.integers(4, 40))
def test_the_tokens_of_the_parts_are_those_of_the_whole(name, text, piece_chars):
    encode, pieces = encoder(TOKENIZERS[name]), TOKENIZERS[name].pieces
    joint = find_joint(encode, pieces)
    parts = list(divide(text, joint, piece_chars=piece_chars, max_chars=len(text)))
    assert [token_id for part in parts for token_id in encode(part)] == encode(text)


def test_parts_are_short_where_there_are_places():
    parts = list(divide("ab cd " * 1000, Joint.KEPT, piece_chars=64, max_chars=6000))
    assert max(map(len, parts)) <= 64
    assert "".join(parts) == "ab cd " * 1000


@pytest.mark.parametrize("joint", list(Joint))
def test_a_text_without_places_is_divided_somewhere_before_it_is_too_long(joint):
    text = "你好" * 500
    parts = list(divide(text, joint, piece_chars=16, max_chars=256))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= 256


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("adds_special", [False, True])
def test_a_long_text_has_the_tokens_of_one_call(name, adds_special):
    tokenizer = TOKENIZERS[name]
    text = "hello world, it is raining in the town\n<|im_end|>12 é " * (3 * PIECE_CHARS // 50)
    assert len(text) > 2 * PIECE_CHARS
    at_once = tokenizer.hf.encode(text, add_special_tokens=adds_special)
    assert tokenizer.encode(text, adds_special=adds_special) == at_once


def test_the_next_place_is_found_however_far_away():
    text = "x" * 10 + "é" * 700_000 + "a b" + "é" * 700_000
    parts = list(divide(text, Joint.KEPT, piece_chars=16, max_chars=len(text)))
    assert [len(part) for part in parts] == [700_011, 700_002]


def test_a_long_text_that_nobody_waits_for_is_left():
    left = threading.Event()
    left.set()

    def work():
        enter_work(left)
        with pytest.raises(AbandonedError):
            TOKENIZERS["regex"].encode("ab cd " * PIECE_CHARS, adds_special=False)
        ended.append(True)

    ended = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended
