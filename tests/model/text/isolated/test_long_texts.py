"""Texts without a place to divide them are tokenised in another process, and hold up nobody."""

import os
import signal
import subprocess
import sys
import threading
from array import array
from pathlib import Path

import pytest
from chat_tokenizers import byte_level, sentencepiece
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast
from waiting import wait_until

from backend.errors import HelperLostError, InvalidRequestError
from backend.model.text.guard import GUARD
from backend.model.text.isolated import long_texts
from backend.model.text.isolated.long_texts import LongTexts
from backend.model.text.reading import (
    MAX_DIRECT_CHARS,
    DirectReader,
    LockedReader,
    Reading,
    reader_of,
)
from backend.model.text.tokenizer import Tokenizer
from backend.pipeline.served_model import tokenised_as
from common.rpc import AbandonedError, enter_work

SPECIAL = ["<|im_end|>", "<s>"]
TOKENIZERS = {"byte level": byte_level(SPECIAL), "sentencepiece": sentencepiece(SPECIAL)}
COUNT = MAX_DIRECT_CHARS + 1
TEXTS = {
    "letters": "xyz" * COUNT,
    "line feeds": "\n" * COUNT,
    "emoji": "🙂" * COUNT,
    "Chinese": "你好，世界。" * (COUNT // 4),
    "digits": "12345" * (COUNT // 4),
    "marks": "你好<|im_end|>" * (COUNT // 8),
    "guarded marks": f"你好<{GUARD}|im_end|>" * (COUNT // 8),
}
# Each run of digits looks ahead to the end of all digits, as published ones do.
QUADRATIC = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))"


def small(pattern: str) -> FastTokenizer:
    fast = FastTokenizer(models.BPE({str(digit): digit for digit in range(10)}, []))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    return fast


@pytest.fixture
def reader():
    """Return a reader, with its process started."""
    reader = DirectReader(TOKENIZERS["byte level"].hf)
    reader.encode(TEXTS["letters"], adds_special=False)
    return reader


def process_of(reader: DirectReader) -> subprocess.Popen[bytes]:
    (helper,) = reader.elsewhere.idle
    return helper.process


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_without_places_has_the_tokens_of_one_call(name, kind):
    tokenizer, text = TOKENIZERS[name], TEXTS[kind]
    fast = tokenizer.hf.backend_tokenizer
    found = tokenizer.encode(text, adds_special=False)
    if GUARD not in text:
        assert found == fast.encode(text, add_special_tokens=False).ids
    else:
        assert tokenizer.decode(found).strip() == text.replace(GUARD, "")
        assert not tokenizer.special_ids & set(found)


def test_the_tokens_of_a_long_text_are_an_array_until_they_are_known_to_fit():
    tokenizer, text = TOKENIZERS["byte level"], TEXTS["letters"]
    found = tokenizer.encode_packed(text, adds_special=True)
    assert isinstance(found, array)
    assert found.tolist() == tokenizer.encode(text, adds_special=True)
    assert tokenizer.encode_prompt_packed(text).tolist() == tokenizer.encode_prompt(text)


def test_the_process_reads_the_file_and_adds_what_was_added_later(tmp_path, monkeypatch):
    TOKENIZERS["byte level"].hf.save_pretrained(tmp_path)
    hf_tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    hf_tokenizer.add_tokens(["世界"])
    defined = []
    monkeypatch.setattr(
        LongTexts, "definition", lambda self, path: defined.append(path) or definition(self, path)
    )
    tokenizer, text = Tokenizer(hf_tokenizer), TEXTS["Chinese"]
    own = hf_tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.token_id("世界") in own
    assert tokenizer.encode(text, adds_special=False) == own
    assert defined == [str(tmp_path / "tokenizer.json")]


definition = LongTexts.definition


def test_a_file_that_another_has_replaced_is_not_believed(tmp_path):
    TOKENIZERS["byte level"].hf.save_pretrained(tmp_path)
    hf_tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(small(r"\d").to_str())
    own = hf_tokenizer.backend_tokenizer.encode(TEXTS["digits"], add_special_tokens=False).ids
    assert Tokenizer(hf_tokenizer).encode(TEXTS["digits"], adds_special=False) == own


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_gives_way_to_requests(reader):
    fields = Path(f"/proc/{process_of(reader).pid}/stat").read_text().rpartition(")")[2].split()
    # 19 is the lowest priority, also for a run that is of a low one itself.
    assert int(fields[16]) == min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)


def test_short_texts_do_not_wait_for_a_long_one_that_its_caller_leaves(reader):
    process, left, errors = process_of(reader), threading.Event(), []

    def work():
        enter_work(left)
        with pytest.raises(AbandonedError):
            reader.encode(TEXTS["letters"], adds_special=False)
        errors.append(True)

    process.send_signal(signal.SIGSTOP)
    thread = threading.Thread(target=work)
    thread.start()
    assert reader.encode("hello", adds_special=False)
    assert thread.is_alive()
    left.set()
    thread.join()
    assert errors
    assert process.poll() is not None
    assert reader.encode(TEXTS["letters"], adds_special=False)


def test_a_text_that_is_nearly_done_when_its_caller_leaves_costs_no_process(reader):
    process, left = process_of(reader), threading.Event()

    def work():
        enter_work(left)
        with pytest.raises(AbandonedError):
            reader.encode(TEXTS["letters"], adds_special=False)

    left.set()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert process_of(reader) is process
    assert process.poll() is None


def test_a_process_that_was_killed_is_started_again_unseen(reader):
    process_of(reader).kill()
    assert reader.encode(TEXTS["letters"], adds_special=False)


def test_a_process_that_is_killed_twice_is_nothing_that_the_caller_did(reader, monkeypatch):
    start = long_texts.start_process

    def start_and_stop(number):
        process = start(number)
        threading.Thread(target=process.kill).start()
        return process

    monkeypatch.setattr(long_texts, "start_process", start_and_stop)
    process_of(reader).kill()
    with pytest.raises(HelperLostError, match="try again"):
        reader.encode(TEXTS["letters"], adds_special=False)
    monkeypatch.undo()
    assert reader.encode(TEXTS["letters"], adds_special=False)


@pytest.mark.slow
def test_a_text_whose_time_grows_with_its_square_is_refused():
    texts = LongTexts(small(QUADRATIC), "", seconds=1)
    with pytest.raises(InvalidRequestError, match=r"^Prompt: takes more than 1 s"):
        texts.columns(Reading.PLAIN, "1" * 1_000_000)
    assert [list(each) for each in texts.columns(Reading.PLAIN, "1" * 1000)] == [[1] * 1000]


@pytest.mark.parametrize("reads", ["here", "elsewhere"])
def test_a_pattern_that_goes_back_too_often_refuses_the_text(reads):
    fast = small(r"(\p{N}+)+$")
    encode = {
        "here": lambda text: reader_of(PreTrainedTokenizerFast(tokenizer_object=fast)).encode(
            text, adds_special=False
        ),
        "elsewhere": lambda text: list(LongTexts(fast, "").columns(Reading.PLAIN, text)[0]),
    }[reads]
    with pytest.raises(InvalidRequestError, match=r"^Prompt: cannot be tokenised: .*retry-limit"):
        encode("1" * 40 + "!")
    assert encode("11") == [1, 1]


def test_a_text_that_cannot_be_tokenised_is_named_by_its_field(reader):
    with pytest.raises(InvalidRequestError) as caught, tokenised_as("documents[3]"):
        reader.encode("\ud800", adds_special=False)
    assert str(caught.value) == "documents[3]: holds a lone surrogate"
    with pytest.raises(InvalidRequestError, match=r"^query: is long"), tokenised_as("documents[3]"):
        raise InvalidRequestError("query", "is long")


@pytest.mark.parametrize("length", [1, COUNT])
def test_a_lone_surrogate_is_refused_at_any_length(reader, length):
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        reader.encode("x" * length + "\ud800", adds_special=False)


def test_a_process_ends_with_its_tokenizer():
    texts = LongTexts(small(r"\d"), "")
    texts.columns(Reading.PLAIN, "1")
    (helper,) = texts.idle
    process = helper.process
    del texts, helper
    wait_until(lambda: process.poll() is not None)


def test_threads_read_at_once_and_get_the_same(reader):
    texts = [f"hello world {number}<|im_end|>" * 50 for number in range(8)]
    expected = [reader.fast.encode(text, add_special_tokens=False).ids for text in texts]
    found = [[] for _ in texts]

    def work(index):
        found[index] = [reader.encode(texts[index], adds_special=False) for _ in range(50)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[ids] * 50 for ids in expected]


class Doing(PreTrainedTokenizerFast):
    def _encode_plus(self, *arguments, **options):
        return super()._encode_plus(*arguments, **options)


def test_a_class_that_does_more_keeps_its_own_way():
    fast = TOKENIZERS["byte level"].hf.backend_tokenizer
    own = reader_of(Doing(tokenizer_object=fast))
    assert isinstance(own, LockedReader)
    direct = reader_of(PreTrainedTokenizerFast(tokenizer_object=fast))
    assert isinstance(direct, DirectReader)
    for text in ("hello <|im_end|>", f"hello <{GUARD}|im_end|>"):
        ids = [each.encode(text, adds_special=False) for each in (own, direct)]
        assert ids[0] == ids[1]
    assert own.placed("hello it") == direct.placed("hello it")
    direct.direct_chars = 0
    assert own.placed("hello it") == direct.placed("hello it")


@pytest.mark.parametrize("limit", [None, 5, 8, 100])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("second", ["it is raining in the town", ""])
@pytest.mark.parametrize("chars", [0, MAX_DIRECT_CHARS])
def test_pairs_are_cut_as_transformers_cuts_them(limit, side, second, chars):
    hf_tokenizer = TOKENIZERS["byte level"].hf
    direct = DirectReader(hf_tokenizer)
    direct.direct_chars = chars
    direct.hf.truncation_side = side
    try:
        found = direct.encode_pair("hello it", second, limit)
    finally:
        direct.hf.truncation_side = "right"
    fresh = PreTrainedTokenizerFast(
        tokenizer_object=FastTokenizer.from_str(hf_tokenizer.backend_tokenizer.to_str()),
        truncation_side=side,
    )
    assert found == LockedReader(fresh).encode_pair("hello it", second, limit)
