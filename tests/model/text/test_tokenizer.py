import json
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as FastTokenizer
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from backend.errors import InvalidRequestError
from backend.model.text.tokenizer import Tokenizer, piece_table

BOS, EOS = "<s>", "</s>"
MARKER, VISIBLE_MARKER = "<|channel|>", "<think>"
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
# Half characters, foreign letters, emoji, spaces at both ends.
HARD_TEXTS = ["", " ", "  two", "tail ", "你好 🙂!", "naïve é", "a\n\tb", "<0x41>", "▁", "Ġ"]


def byte_level() -> PreTrainedTokenizerFast:
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    fast.train_from_iterator(["the quick brown fox, the lazy dog, hello hello world"], trainer)
    return wrapped(fast)


def sentencepiece(*, strips: bool) -> PreTrainedTokenizerFast:
    words = ["▁hello", "▁world", "▁", "▁▁", "lo", "h", "你好", "é"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    scores = [(token, -10.0) for token in ["<unk>", *byte_tokens]]
    scores += [(word, -1.0) for word in words]
    fast = FastTokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    fast.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if strips else []), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strips:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    fast.decoder = decoders.Sequence(steps)
    return wrapped(fast)


def word_level() -> PreTrainedTokenizerFast:
    fast = FastTokenizer(models.WordLevel({"hello": 1, "a": 2}))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.decoder = decoders.WordPiece()
    return wrapped(fast)


def wrapped(fast: FastTokenizer) -> PreTrainedTokenizerFast:
    """Add BOS before every text and EOS after it, and markers of both kinds."""
    fast.add_special_tokens([BOS, EOS, AddedToken(MARKER, normalized=False, special=True)])
    fast.add_tokens([AddedToken(VISIBLE_MARKER, normalized=False, special=False)])
    ids = [(token, fast.token_to_id(token)) for token in (BOS, EOS)]
    fast.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=ids
    )
    return PreTrainedTokenizerFast(tokenizer_object=fast, bos_token=BOS, eos_token=EOS)


MAKERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": byte_level,
    "sentencepiece": lambda: sentencepiece(strips=True),
    "sentencepiece without strip": lambda: sentencepiece(strips=False),
}
TOKENIZERS = {name: Tokenizer(make()) for name, make in MAKERS.items()}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]


def joined(tokenizer: Tokenizer, ids: list[int]) -> str:
    assert tokenizer.pieces is not None
    text = b"".join(tokenizer.pieces[token_id] for token_id in ids).decode()
    return text.removeprefix(" ") if tokenizer.trims_leading_space else text


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_pieces_join_to_what_the_tokenizer_decodes(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(f"{text}{MARKER}{text}", adds_special=True)
    assert joined(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXT)
def test_pieces_join_to_what_the_tokenizer_decodes_for_any_text(name: str, text: str):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, adds_special=False)
    assert joined(tokenizer, ids) == tokenizer.decode(ids)


@given(data=st.data())
def test_byte_level_pieces_decode_like_the_tokenizer_for_any_ids(data: st.DataObject):
    tokenizer = TOKENIZERS["byte-level"]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer.pieces or ()) - 1)))
    pieces = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
    assert pieces.decode(errors="replace") == tokenizer.decode(ids)


def test_only_the_strip_step_trims_a_leading_space():
    trimming = [name for name, each in TOKENIZERS.items() if each.trims_leading_space]
    assert trimming == ["sentencepiece"]


def test_special_tokens_are_blank_in_the_visible_pieces(tokenizer: Tokenizer):
    visible = tokenizer.visible_pieces(())
    assert visible is not None
    hidden = [tokenizer.token_id(text) for text in (BOS, EOS, MARKER)]
    assert [visible[token_id] for token_id in hidden] == [b""] * 3
    assert visible[tokenizer.token_id(VISIBLE_MARKER)] == VISIBLE_MARKER.encode()


def test_markers_of_the_format_stay_visible(tokenizer: Tokenizer):
    visible = tokenizer.visible_pieces({MARKER})
    assert visible is not None
    assert visible[tokenizer.token_id(MARKER)] == MARKER.encode()
    assert visible[tokenizer.token_id(EOS)] == b""


def test_a_visible_decoder_leaves_out_special_tokens_but_markers(tokenizer: Tokenizer):
    special = sorted(tokenizer.special_ids)
    texts = {tokenizer.decode([token_id]) for token_id in special}
    assert tokenizer.visible_decoder(frozenset())(special) == ""
    assert tokenizer.visible_decoder(texts)(special) == tokenizer.decode(special)


def test_the_visible_pieces_are_built_once_for_the_same_markers(tokenizer: Tokenizer):
    assert tokenizer.visible_pieces([MARKER]) is tokenizer.visible_pieces({MARKER})


def test_a_decoder_that_looks_at_neighbours_has_no_table():
    tokenizer = Tokenizer(word_level())
    assert tokenizer.pieces is None
    assert tokenizer.visible_pieces({MARKER}) is None
    assert tokenizer.token_bytes(1) == b"hello"
    assert tokenizer.longest_piece_bytes == len(MARKER)


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"},
        {"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "Fuse"}]},
        {"type": "Sequence", "decoders": []},
    ],
)
def test_an_unknown_decoder_has_no_table(decoder: dict[str, object]):
    assert piece_table(decoder, {"a": 0}) is None


def test_ids_without_a_token_have_no_bytes(tokenizer: Tokenizer):
    size = len(tokenizer.vocabulary)
    assert tokenizer.token_bytes(size + 7) == b""
    assert tokenizer.decode([size + 7, -1, 2**40]) == ""


def test_a_tokenizer_in_python_has_no_table_and_skips_unknown_ids_too():
    tokenizer = Tokenizer(ByT5Tokenizer())
    ids = tokenizer.encode_prompt("naïve")
    assert tokenizer.pieces is None
    assert tokenizer.decode([*ids, 9999]) == "naïve"


def test_gaps_in_the_vocabulary_are_empty_pieces():
    table = piece_table({"type": "ByteLevel"}, {"a": 0, "b": 2})
    assert table is not None
    assert table.pieces == (b"a", b"", b"b")


def test_a_raw_prompt_begins_with_bos_and_has_no_end(tokenizer: Tokenizer):
    ids = tokenizer.encode_prompt("hello")
    assert ids[0] == tokenizer.token_id(BOS)
    assert tokenizer.token_id(EOS) not in ids


def test_a_raw_prompt_that_has_bos_gets_no_second_one(tokenizer: Tokenizer):
    ids = tokenizer.encode_prompt(f"{BOS}hello")
    assert ids.count(tokenizer.token_id(BOS)) == 1


def test_a_rendered_prompt_is_encoded_without_additions(tokenizer: Tokenizer):
    ids = tokenizer.encode("hello", adds_special=False)
    assert not tokenizer.special_ids.intersection(ids)
    assert tokenizer.encode("hello", adds_special=True) == [
        tokenizer.token_id(BOS),
        *ids,
        tokenizer.token_id(EOS),
    ]


def test_a_chosen_bos_replaces_the_tokenizers_own():
    plain = TOKENIZERS["byte-level"]
    marker_id = plain.token_id(MARKER)
    tokenizer = Tokenizer(byte_level(), bos_id=marker_id)
    assert tokenizer.encode_prompt("hello") == [
        marker_id,
        *plain.encode("hello", adds_special=False),
    ]


def test_a_lone_surrogate_is_an_invalid_request(tokenizer: Tokenizer):
    with pytest.raises(InvalidRequestError, match="surrogate"):
        tokenizer.encode("a\ud800b", adds_special=False)


def test_threads_encode_and_decode_at_once(tokenizer: Tokenizer):
    text = "hello world 你好 " * 50
    expected = tokenizer.encode_prompt(text)
    results: list[bool] = []

    def work() -> None:
        for _ in range(20):
            ids = tokenizer.encode_prompt(text)
            results.append(ids == expected and tokenizer.decode(ids).strip().endswith("你好"))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 80


def test_the_state_of_a_decoder_is_its_json():
    """`_piece_table` relies on this in tokenizers 0.23."""
    fast = byte_level().backend_tokenizer
    whole = json.loads(fast.to_str())["decoder"]
    assert json.loads(fast.decoder.__getstate__()) == whole
