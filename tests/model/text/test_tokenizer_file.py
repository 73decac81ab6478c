"""Whatever class transformers makes of a tokenizer.json, the tokens are the file's."""

import json
import logging
import re
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_tokenizers import KINDS, TEXTS, TURN_END, UNKNOWN, write
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from backend.config import ModelOptions
from backend.errors import UnreadableTokenizerError
from backend.model.checkpoint.upstream import HfTokenizer
from backend.model.text.hf_tokenizer import read_tokenizer
from backend.model.text.tokenizer import Tokenizer
from backend.model.text.tokenizer_file import (
    follow_file,
    follow_held,
    follow_wrapped,
    keep_files,
    read_by_file,
)
from backend.output.reply import ByteDetokenizer, Detokenizer, WindowDetokenizer

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
PIECES = [
    "1",
    "22",
    " ",
    "  ",
    "\n",
    "\t",
    "a",
    "Ab",
    "é",
    "e\u0301",
    "ß",
    "日",
    "٣",
    "ﬁ",
    "'s",
    "▁",
]
HARD_TEXT = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)


def read(directory: Path) -> Tokenizer:
    return Tokenizer(read_tokenizer(ModelOptions(model=str(directory)), directory))


@cache
def both(kind: str) -> tuple[Tokenizer, FastTokenizer]:
    directory = Path(mkdtemp())
    published = write(kind, directory)
    return read(directory), published


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_file(kind: str, text: str):
    tokenizer, published = both(kind)
    assert tokenizer.encode(text, adds_special=False) == bare(published, text)
    assert tokenizer.encode(text, adds_special=True) == published.encode(text).ids


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(text=ANY_TEXT | HARD_TEXT)
def test_ids_of_any_text_are_those_of_the_file(kind: str, text: str):
    tokenizer, published = both(kind)
    assert tokenizer.encode(text, adds_special=False) == bare(published, text)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(data=st.data())
def test_any_ids_decode_as_the_file_says(kind: str, data: st.DataObject):
    tokenizer, published = both(kind)
    ids = data.draw(st.lists(st.integers(0, published.get_vocab_size() - 1), max_size=40))
    text = published.decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(data=st.data())
def test_any_ids_stream_as_the_file_decodes_them(kind: str, data: st.DataObject):
    tokenizer, published = both(kind)
    plain = [i for i in range(published.get_vocab_size()) if i not in tokenizer.special_ids]
    ids = data.draw(st.lists(st.sampled_from(plain), max_size=40))
    text = published.decode(ids, skip_special_tokens=False)
    if "sentencepiece" in kind and "\ufffd" in text:
        return  # That decoder drops whole runs of bytes with one wrong one; a stream cannot wait.
    detokenizer = streaming(tokenizer)
    pieces = [detokenizer.decode(token_id) for token_id in ids]
    assert "".join(pieces) + detokenizer.flush() == text.replace("\ufffd", "")


def streaming(tokenizer: Tokenizer) -> Detokenizer:
    pieces = tokenizer.visible_pieces(())
    if pieces is None:
        return WindowDetokenizer(tokenizer.visible_decoder(()))
    return ByteDetokenizer(pieces, trims_leading_space=tokenizer.trims_leading_space)


def bare(published: FastTokenizer, text: str) -> list[int]:
    return published.encode(text, add_special_tokens=False).ids


def test_the_library_alone_would_give_other_ids(tmp_path: Path):
    """Otherwise the tests here prove nothing."""
    published = write("single digits", tmp_path)
    library = AutoTokenizer.from_pretrained(tmp_path)
    assert library.encode(TEXTS[0], add_special_tokens=False) != bare(published, TEXTS[0])


def test_a_corrected_library_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    write("single digits", tmp_path)
    read(tmp_path)
    told = [r.getMessage() for r in caplog.records if "tokenizer.json" in r.getMessage()]
    assert len(told) == 1
    assert "GPT2Tokenizer of transformers" in told[0]


def test_a_library_that_reads_the_file_is_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    write("no class", tmp_path)
    read(tmp_path)
    assert "tokenizer.json" not in caplog.text


def test_tokens_of_the_config_are_added_to_those_of_the_file(tmp_path: Path):
    token = {"content": "<tool>", "lstrip": False, "rstrip": False, "single_word": False}
    published = write(
        "single digits",
        tmp_path,
        added_tokens_decoder={"500": token | {"normalized": False, "special": False}},
        extra_special_tokens=["<seen>"],
    )
    tokenizer = read(tmp_path)
    size = published.get_vocab_size()
    assert [tokenizer.token_id(text) for text in ("<tool>", "<seen>")] == [size, size + 1]
    assert tokenizer.special_ids >= {size + 1}
    assert size not in tokenizer.special_ids
    assert tokenizer.encode("1<tool>22", adds_special=False) == [
        *bare(published, "1"),
        size,
        *bare(published, "22"),
    ]


def test_what_the_config_says_about_being_special_counts(tmp_path: Path):
    published = write("runs of spaces", tmp_path)
    fold = published.token_to_id("<fold>")
    assert fold not in read(tmp_path).special_ids
    token = {"content": "<fold>", "lstrip": False, "rstrip": False, "single_word": False}
    write(
        "runs of spaces",
        tmp_path,
        added_tokens_decoder={str(fold): token | {"normalized": False, "special": True}},
    )
    tokenizer = read(tmp_path)
    assert fold in tokenizer.special_ids
    # It still takes the spaces around it, as the file says.
    assert tokenizer.encode("a <fold> b", adds_special=False) == bare(published, "a <fold> b")


def test_defaults_of_a_class_that_no_file_names_are_no_tokens(tmp_path: Path):
    """GPT2Tokenizer would add "<|endoftext|>" after the last row of the embedding."""
    published = write("single digits", tmp_path)
    hf_tokenizer = read_tokenizer(ModelOptions(model=str(tmp_path)), tmp_path)
    tokenizer = Tokenizer(hf_tokenizer)
    assert max(tokenizer.vocabulary.values()) < published.get_vocab_size()
    assert "<|endoftext|>" not in tokenizer.vocabulary
    assert hf_tokenizer.unk_token is hf_tokenizer.bos_token is None
    assert hf_tokenizer.eos_token_id == published.token_to_id(TURN_END)


@pytest.mark.parametrize("kind", KINDS)
def test_an_excerpt_of_the_vocabulary_gives_the_same_tokenizer(kind: str, tmp_path: Path):
    token = {"content": "<tool>", "lstrip": False, "rstrip": False, "single_word": False}
    write(
        kind,
        tmp_path,
        added_tokens_decoder={"500": token | {"normalized": False, "special": False}},
        extra_special_tokens=["<seen>"],
        model_max_length=77,
        padding_side="left",
    )
    seen: list[FastTokenizer] = []

    def read_folder(directory: Path) -> HfTokenizer:
        seen.append(FastTokenizer.from_file(str(directory / "tokenizer.json")))
        return AutoTokenizer.from_pretrained(directory)

    ours = read_by_file(tmp_path, read_folder)
    whole = follow_file(AutoTokenizer.from_pretrained(tmp_path), tmp_path)
    (excerpt,) = seen
    added = {token.content for token in excerpt.get_added_tokens_decoder().values()}
    words = {one for one in excerpt.get_vocab() if len(one.strip("#▁")) > 1} - added
    assert all(one.startswith("<0x") or one in {"[UNK]", UNKNOWN} for one in words)
    assert ours.backend_tokenizer.to_str() == whole.backend_tokenizer.to_str()
    assert type(ours) is type(whole)
    for name in ("special_tokens_map", "added_tokens_decoder", "all_special_ids", "name_or_path"):
        assert getattr(ours, name) == getattr(whole, name)
    for name in ("model_max_length", "padding_side", "model_input_names", "chat_template"):
        assert getattr(ours, name) == getattr(whole, name)


def test_a_class_that_cannot_take_an_excerpt_gets_the_whole_vocabulary(tmp_path: Path):
    published = write("single digits", tmp_path)

    def read_whole(directory: Path) -> HfTokenizer:
        if directory != tmp_path:
            raise KeyError(directory)
        return AutoTokenizer.from_pretrained(directory)

    hf_tokenizer = read_by_file(tmp_path, read_whole)
    assert hf_tokenizer.encode(TEXTS[0], add_special_tokens=False) == bare(published, TEXTS[0])


def test_a_class_that_does_more_than_pass_texts_on_gets_the_whole_vocabulary(tmp_path: Path):
    class Own(PreTrainedTokenizerFast):
        def encode(self, *arguments, **options):
            return super().encode(*arguments, **options)

    write("no class", tmp_path)
    places: list[Path] = []

    def read_own(directory: Path) -> HfTokenizer:
        places.append(directory)
        return Own.from_pretrained(directory)

    assert isinstance(read_by_file(tmp_path, read_own), Own)
    assert places[-1] == tmp_path


def test_a_file_that_no_library_can_read_is_named(tmp_path: Path):
    write("no class", tmp_path)
    path = tmp_path / "tokenizer.json"
    broken = json.loads(path.read_text(encoding="utf-8")) | {"decoder": {"type": "Nonsense"}}
    path.write_text(json.dumps(broken), encoding="utf-8")
    with pytest.raises(UnreadableTokenizerError, match=re.escape(f"{tmp_path} has no readable")):
        read(tmp_path)


def test_limits_of_the_file_cut_nothing_off(tmp_path: Path):
    published = write("single digits", tmp_path)
    published.enable_truncation(4)
    published.enable_padding(length=100)
    published.save(str(tmp_path / "tokenizer.json"))
    published.no_truncation()
    published.no_padding()
    assert read(tmp_path).encode(TEXTS[0], adds_special=True) == published.encode(TEXTS[0]).ids


def test_a_checkpoint_without_the_file_keeps_its_tokenizer(tmp_path: Path):
    published = write("single digits", tmp_path)
    model = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")
    library = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = read(tmp_path)
    assert tokenizer.encode(TEXTS[0], adds_special=False) == library.encode(
        TEXTS[0], add_special_tokens=False
    )
    assert published.get_vocab().keys() >= model["vocab"].keys()


class Holder:
    """A media processor, or mlx-lm's wrapper."""

    def __init__(self, tokenizer: object) -> None:
        self.tokenizer = self._tokenizer = tokenizer


def test_held_tokenizers_follow_too(tmp_path: Path):
    published = write("single digits", tmp_path)
    for follow in (follow_wrapped, follow_held):
        holder = Holder(AutoTokenizer.from_pretrained(tmp_path))
        follow(holder, tmp_path)
        ids = holder.tokenizer.encode(TEXTS[0], add_special_tokens=False)
        assert ids == bare(published, TEXTS[0])


def test_a_tokenizer_from_elsewhere_stays(tmp_path: Path):
    own, other = tmp_path / "own", tmp_path / "other"
    for directory, kind in ((own, "single digits"), (other, "unigram")):
        directory.mkdir()
        write(kind, directory)
    holder = Holder(AutoTokenizer.from_pretrained(other))
    ids = holder.tokenizer.encode(TEXTS[0])
    follow_held(holder, own)
    assert holder.tokenizer.encode(TEXTS[0]) == ids


def test_tokens_that_a_processor_adds_stay(tmp_path: Path):
    write("single digits", tmp_path, unk_token=TURN_END, bos_token=TURN_END)
    holder = Holder(AutoTokenizer.from_pretrained(tmp_path))
    holder.tokenizer.add_tokens(["<image>"])
    token_id = holder.tokenizer.convert_tokens_to_ids("<image>")
    follow_held(holder, tmp_path)
    assert holder.tokenizer.encode("<image>", add_special_tokens=False) == [token_id]


def test_a_copy_of_a_checkpoint_keeps_the_files(tmp_path: Path):
    published = write("single digits", tmp_path)
    copy = tmp_path / "copy"
    AutoTokenizer.from_pretrained(tmp_path).save_pretrained(copy)
    assert FastTokenizer.from_file(str(copy / "tokenizer.json")).encode(TEXTS[0]).ids != bare(
        published, TEXTS[0]
    )
    keep_files(tmp_path, copy)
    assert read(copy).encode(TEXTS[0], adds_special=False) == bare(published, TEXTS[0])
