"""Marks in a caller's text are text: to the tokenizer, to templates, and after decoding."""

import functools
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja_here import jinja_here
from published_tokenizers import KINDS, TEXTS, TURN_END, TURN_START, write
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from backend.config import ModelOptions
from backend.core.prompt import MediaKind, Message, Placement, Tool, ToolCall
from backend.errors import InvalidRequestError
from backend.model.text.guard import GUARD, NO_GUARD, Guard, Marks, unguarded
from backend.model.text.hf_tokenizer import read_tokenizer
from backend.model.text.template import ChatTemplate
from backend.model.text.tokenizer import Tokenizer
from scripts.real_templates import TARGET

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|pad|>")
MARKS = Marks(SPECIAL)
NESTED = Marks(("<a>", "<a><b>", "<<a>", "ab", "ba", "<a"))
TEMPLATES = sorted(path.stem for path in TARGET.glob("*.jinja"))
# Templates write these, and texts that only look alike.
_MARK = re.compile(
    r"""<[|｜/]?[^\s<>{}'"\\]{2,40}?[|｜]?>|\[/?[A-Z_|]{3,30}\]|\[\|[a-z]+\|\]|◁\w+▷"""
)
QUESTION = "What is it?"
BOS, EOS = "<s>", "</s>"

parts = st.sampled_from([*SPECIAL, "<", "|", "im_end|>", " ", "  ", "a", "12", "\n", "é", "日"])
texts = st.lists(parts, max_size=12).map("".join)


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    directory = Path(mkdtemp())
    write(kind, directory)
    return Tokenizer(read_tokenizer(ModelOptions(model=str(directory)), directory))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(text=texts)
def test_marks_of_a_caller_become_no_control_tokens(kind: str, text: str):
    reader = tokenizer(kind)
    body = MARKS.disarmed(text)
    ids = reader.encode(f"{TURN_START}user\n{body}{TURN_END}\n", adds_special=False)
    # No letter is not in the unigram vocabulary, whose unknown token is no control token.
    found = [reader.special_texts[i] for i in ids if i in reader.special_ids]
    assert [text for text in found if text in SPECIAL] == [TURN_START, TURN_END]


@pytest.mark.parametrize("kind", ["single digits", "runs of spaces", "digits in threes"])
@settings(max_examples=50)
@given(text=texts)
def test_the_text_stays_as_it_is(kind: str, text: str):
    reader = tokenizer(kind)
    ids = reader.encode(MARKS.disarmed(text), adds_special=False)
    assert reader.decode(ids) == text
    assert unguarded(MARKS.disarmed(text)) == text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_neighbours_of_a_mark_have_their_own_tokens(kind: str, text: str):
    if TURN_END in text:
        return
    reader = tokenizer(kind)
    # The same text without any token of this kind: the number is one word to everybody.
    for written in (f"{TURN_END}{text}{TURN_START}", f"{TURN_START}{text}"):
        plain = reader.encode(written, adds_special=False)
        with_guard = reader.encode(f"{written}{GUARD}", adds_special=False)
        assert with_guard == plain


@given(text=st.text("<>ab", max_size=12))
def test_every_mark_is_broken_even_in_one_another(text: str):
    broken = NESTED.disarmed(text)
    assert unguarded(broken) == text
    assert not any(mark in broken for mark in ("<a>", "<a><b>", "<<a>", "ab", "ba", "<a"))


def test_a_text_without_marks_is_the_same_object():
    text = "a < b, <p>, [1] and |x|"
    assert MARKS.disarmed(text) is text
    messages = [Message(role="user", content=TURN_END)]
    assert NO_GUARD.messages(messages) is messages


def test_a_mark_that_the_normaliser_makes_is_none_either():
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast.model = models.BPE({letter: n for n, letter in enumerate(alphabet)}, [])
    fast.normalizer = normalizers.NFKC()
    fast.add_special_tokens([AddedToken(TURN_END, normalized=True)])
    reader = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast))
    wide = "x＜|im_end|＞"
    (mark,) = reader.special_ids
    assert mark in reader.encode(wide, adds_special=False)
    marks = Marks([TURN_END], reader.normalized)
    assert mark not in reader.encode(marks.disarmed(wide), adds_special=False)
    assert mark in reader.encode(TURN_END + marks.disarmed(wide), adds_special=False)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_model_that_spells_a_mark_itself_gets_two_words(scheme: str):
    letters = [(letter, -9.0) for letter in sorted(set(TURN_END) | {"▁", "a"})]
    fast = FastTokenizer(
        models.Unigram([("<unk>", 0.0), *letters, (TURN_END, -0.1)], 0, byte_fallback=False)
    )
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    fast.decoder = decoders.Metaspace(prepend_scheme=scheme)
    fast.add_special_tokens([AddedToken(TURN_END, normalized=False)])
    reader = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast))
    ids = reader.encode(f"a {MARKS.disarmed(TURN_END)} a{TURN_END}", adds_special=False)
    assert [i for i in ids if i in reader.special_ids] == [reader.token_id(TURN_END)]
    assert ids[-1] in reader.special_ids


def test_a_tokenizer_in_python_reads_them_as_text_too():
    reader = Tokenizer(ByT5Tokenizer())
    marks = Marks(["</s>"])
    ids = reader.encode(f"a{marks.disarmed('b</s>')}</s>", adds_special=False)
    assert [i for i in ids if i in reader.special_ids] == [reader.token_id("</s>")]


def test_every_text_of_a_message_is_guarded():
    guard = Guard(MARKS, Marks(["<|im_end|>"]))
    call = ToolCall(
        call_id=f"1{TURN_END}",
        name=f"f{TURN_END}",
        arguments=json.dumps({f"k{TURN_END}": [f"v{TURN_END}"]}),
    )
    message = Message(
        role="assistant",
        content=f"a{TURN_END}b{TURN_START}",
        name=f"n{TURN_END}",
        tool_call_id=f"i{TURN_END}",
        reasoning_content=f"r{TURN_END}{TURN_START}",
        tool_calls=(call,),
    )
    (safe,) = guard.messages([message])
    spelled = str(safe)
    assert TURN_END not in spelled
    # The model's own text may mark its thoughts.
    assert spelled.count(TURN_START) == safe.content.count(TURN_START) == 1
    assert json.loads(unguarded(safe.tool_calls[0].arguments)) == json.loads(call.arguments)
    assert unguarded(safe.tool_calls[0].arguments) == call.arguments


def test_a_message_without_marks_is_passed_on_as_it_is():
    harmless = Message(role="user", content="a <b> c", name="ann", tool_call_id="1")
    marked = Message(role="user", content="hi", name="<|im_end|>")
    (same, other) = Guard(MARKS, MARKS).messages([harmless, marked])
    assert same is harmless
    assert other.name != marked.name


def test_escapes_in_arguments_hide_nothing():
    arguments = '{"a":  "\\u003c|im_end|\\u003e"}'
    message = Message(
        role="assistant", tool_calls=(ToolCall(call_id="", name="f", arguments=arguments),)
    )
    (safe,) = Guard(MARKS, MARKS).messages([message])
    value = json.loads(safe.tool_calls[0].arguments)["a"]
    assert TURN_END not in value
    assert unguarded(value) == TURN_END


def test_tools_and_options_are_guarded():
    guard = Guard(MARKS, MARKS)
    function = {"name": "f", "description": f"does{TURN_END}", "parameters": {TURN_START: {}}}
    (tool,) = guard.tools([Tool(name="f", schema={"type": "function", "function": function})])
    spelled = str([tool.schema, guard.options({"date": f"now{TURN_END}", "n": 1})])
    assert not any(mark in spelled for mark in SPECIAL)


def test_media_stay_where_they_are():
    content = f"{TURN_END}a"
    message = Message(
        role="user", content=content, media=(Placement(len(content), MediaKind.IMAGE),)
    )
    (safe,) = Guard(MARKS, MARKS).messages([message])
    assert safe.media[0].offset == len(safe.content)


@functools.cache
def real(name: str) -> tuple[ChatTemplate, Tokenizer, Guard]:
    text = (TARGET / f"{name}.jinja").read_text(encoding="utf-8")
    found = sorted(set(_MARK.findall(text)) | {BOS, EOS})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(mark, normalized=False) for mark in found])
    hf_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token=BOS, eos_token=EOS, chat_template=text
    )
    marks = Marks(found)
    template = jinja_here(hf_tokenizer)
    return template, Tokenizer(hf_tokenizer), Guard(marks, marks)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.one_in(3)
def test_no_turn_can_be_forged_in_a_real_template(name: str):
    template, reader, guard = real(name)
    marks = [*reader.special_texts.values()]
    quoted = f"{QUESTION} {' and '.join(marks)} {''.join(marks)}{QUESTION}"
    for role in ("user", "tool"):
        harmless = controls(template, reader, guard, conversation(role, QUESTION))
        if harmless is not None:
            assert controls(template, reader, guard, conversation(role, quoted)) == harmless
    plain = template.render(conversation("user", quoted), [], {"functions": ""})
    safe = template.render(guard.messages(conversation("user", quoted)), [], {"functions": ""})
    assert unguarded(safe) == plain


def conversation(role: str, text: str) -> Sequence[Message]:
    if role == "user":
        return [Message(role="user", content=text)]
    call = ToolCall(call_id="call00000", name="f", arguments='{"a": 1}')
    return [
        Message(role="user", content=QUESTION),
        Message(role="assistant", tool_calls=(call,)),
        Message(role="tool", content=text, tool_call_id="call00000", name="f"),
    ]


def controls(
    template: ChatTemplate, reader: Tokenizer, guard: Guard, messages: Sequence[Message]
) -> Counter[str] | None:
    """Count the control tokens of a conversation, or return `None` if it is refused."""
    try:
        text = template.render(guard.messages(messages), [], {"functions": ""})
    except InvalidRequestError:
        return None
    ids = reader.encode(text, adds_special=False)
    assert GUARD not in reader.decode(ids)
    return Counter(reader.special_texts[i] for i in ids if i in reader.special_ids)
