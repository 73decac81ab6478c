"""Citations of Cohere's models: the words stay, the tags go."""

import golden
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backend.core.step import ContentDelta, FinishReason
from backend.output.citations import CitedRouter
from backend.output.readers.reader import ReaderOutput
from backend.output.reply import ReplySpec

TOOLS = {"w": {"type": "object", "properties": {"text": {"type": "string"}}}}
ANSWER = "<|START_RESPONSE|>{}<|END_RESPONSE|>"
CALL = (
    '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "w", "parameters": {"text": "%s"}}]'
    "<|END_ACTION|>"
)
LONG = "word " * 500
PARTS = [
    "<co>",
    "</co>",
    "<co: 0>",
    "</co: 0:[1,2],1:[0]>",
    "</co: 0>",
    "<",
    "</co",
    "a b",
    "\n",
    "é",
    ">",
]


def played(text, *, stop=FinishReason.STOP, tools="cohere", **options):
    reasoning = "cohere_think" if tools == "cohere" else "none"
    spec = ReplySpec(format=golden.named_format(f"{tools}!", reasoning), tools=TOOLS, **options)
    whole = golden.play(spec, [text], stop)
    halves = ([text[:cut], text[cut:]] for cut in range(1, min(len(text), 300)))
    for other in (text, *halves):
        cut = golden.play(spec, other, stop)
        assert (cut.content, cut.reasoning) == (whole.content, whole.reasoning), other
        assert golden.named_calls(cut) == golden.named_calls(whole)
    return whole


@pytest.mark.parametrize(
    ("cited", "plain"),
    [
        ("It is <co>Paris</co: 0:[0]>.", "It is Paris."),
        ("<co>A</co: 0:[1,2],1:[0]>, <co>b c</co: 1:[3]>!", "A, b c!"),
        (
            "It is <co: 0>Paris</co: 0>, <co: 0,2>the capital</co: 0,2>.",
            "It is Paris, the capital.",
        ),
        ("- <co>**a** `b`</co: 0:[0]>\n- <co>c\n\nd</co: 0:[1]>", "- **a** `b`\n- c\n\nd"),
        ('```json\n[<co: 0>"x</co: 0>"]\n```', '```json\n["x"]\n```'),
        ("```\n<co>x = 1</co: 0:[0]>\n```", "```\nx = 1\n```"),
        ("no end <co>of <co>it</co: 0:[0]>", "no end of it"),
        ("<co>open", "open"),
        ("closed</co: 0:[0]> alone", "closed alone"),
        # Other markup.
        ("<co>Acme</co>", "<co>Acme</co>"),
        ("<root><co>A</co><co:n>B</co:n></root>", "<root><co>A</co><co:n>B</co:n></root>"),
        ("a < b, <cost>, <col>, </co x>", "a < b, <cost>, <col>, </co x>"),
        (f"<co>{LONG}</co: 0:[0]>", f"<co>{LONG}"),
        ("<co: what is it?>", "<co: what is it?>"),
    ],
)
def test_words_stay_and_tags_go(cited, plain):
    assert played(ANSWER.format(cited)).content == plain


def test_thoughts_cite_too_and_arguments_stay_as_they_are():
    text = "<co>tags</co: 0:[0]>"
    reply = played(f"<|START_THINKING|>So {text}.<|END_THINKING|>" + CALL % text)
    assert reply.reasoning == "So tags."
    assert golden.named_calls(reply) == (("w", f'{{"text": "{text}"}}'),)


def test_what_waits_leaves_before_a_call():
    reply = played("See <co>this" + CALL % "x")
    assert reply.content == "See this"
    assert reply.finish.reason is FinishReason.TOOL_CALLS


def test_the_older_models_cite_too():
    assert played("<co: 1>Yes</co: 1>.", tools="command_r_plus").content == "Yes."


def test_other_families_do_not():
    assert played("<co: 1>Yes</co: 1>.", tools="hermes_json").content == "<co: 1>Yes</co: 1>."


def test_an_answer_that_a_grammar_rules_is_whole():
    text = '{"a": "<co>x</co: 0:[0]>"}'
    assert played(text, is_ruled=True).content == text


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("It is <co>Par", "It is Par"),
        ("It is <co", "It is "),
        ("It is <co>Paris</co: 0:[", "It is Paris"),
        ("It is <co>Paris</c", "It is Paris</c"),
        ("It is <co: 0", "It is "),
    ],
)
def test_a_cut_off_reply_shows_no_begun_tag(text, content):
    assert played(text, stop=FinishReason.LENGTH).content == content


@given(st.lists(st.sampled_from(PARTS), max_size=9), st.booleans())
@example(["<co>", "<co>", "</co", "a b"], True)
def test_the_cut_makes_no_difference(parts, truncated):
    played("".join(parts), stop=FinishReason.LENGTH if truncated else FinishReason.STOP)


def test_a_stop_string_is_sought_in_what_is_shown():
    assert played("It is <co>Paris</co: 0:[0]>.", stop_strings=("is Paris",)).content == "It "


class Unreadable(str):
    """A text whose tags cannot be read, as after a mistake in that code."""

    def __radd__(self, other):
        raise RuntimeError("a bug")


class Reader:
    """Passes a piece of content with its first text, and raises at an exclamation mark."""

    is_mid_call = False

    def __init__(self, context):
        self.held = context.opener

    def feed(self, text):
        if "!" in text:
            raise RuntimeError("a bug")
        self.held = ""
        return ReaderOutput((ContentDelta("See "), ContentDelta(Unreadable("<co: 0>this"))))


@pytest.mark.parametrize(
    ("chunks", "content"),
    [
        (
            ["<co>A <co", "<|START_ACTION|>!", "</co: 0:[0]>"],
            "<co>A <co<|START_ACTION|>!</co: 0:[0]>",
        ),
        (["<co>A ", "<|START_ACTION|>b", "<co: 0>c"], "<co>A See <co: 0>this<co: 0>c"),
    ],
)
def test_a_mistake_costs_no_text(chunks, content, caplog):
    output_format = golden.named_format("cohere!", "cohere_think")
    router = CitedRouter(
        output_format,
        citations=output_format.citations,
        tools=TOOLS,
        make_reader=lambda _, context: Reader(context),
    )
    deltas = [delta for chunk in chunks for delta in router.feed(chunk)]
    deltas += router.finish(truncated=False)
    assert "".join(delta.text for delta in deltas) == content
    assert len(caplog.records) == 1
