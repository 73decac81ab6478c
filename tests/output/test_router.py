import re
from dataclasses import replace

import pytest
from golden import named_format
from hypothesis import given
from hypothesis import strategies as st

from backend.core.step import ContentDelta, ReasoningDelta, ToolCallDelta
from backend.formats.format import NO_REASONING, ReasoningFormat, ToolFormat
from backend.formats.thoughts import THINK
from backend.output.readers.reader import ReaderOutput
from backend.output.reply_format import OutputFormat
from backend.output.router import Router

HERMES = named_format("hermes", "think")
PLAIN = named_format("none", "none")
TOOLS = {"f": {}, "get_weather": {}}
IN_THOUGHT = "<think>\n"
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<", "</t", "<to"]
CALLS = ['{"name": "f", "arguments": {}}', '{"name": "f", ', '"arguments": {"a": "']
CALLS += ['{"arguments": ', '"name": "f"}', "}}", "{", "}", "[", "]", '"', "\\", ","]
FRAGMENTS = [*MARKERS, *CALLS, "\n", " ", "é", "word"]
TAILS = st.sampled_from(["", IN_THOUGHT])


def make_router(output_format=HERMES, tools=TOOLS, *, prompt_tail="", reader=None):
    options = {"make_reader": lambda _, context: reader(context)} if reader else {}
    return Router(output_format, tools=tools, prompt_tail=prompt_tail, **options)


def run(chunks, router=None, *, truncated=False):
    router = router or make_router()
    deltas = [delta for chunk in chunks for delta in router.feed(chunk)]
    return [*deltas, *router.finish(truncated=truncated)]


def folded(deltas):
    """Return content, reasoning, and name and arguments of each call."""
    calls = {}
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            name, arguments = calls.get(delta.index, ("", ""))
            calls[delta.index] = (name + delta.name, arguments + delta.arguments)
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    return content, reasoning, calls


def in_order(deltas):
    """Return everything that can be read, in order."""
    parts = (
        delta.name + delta.arguments if isinstance(delta, ToolCallDelta) else delta.text
        for delta in deltas
    )
    return "".join(parts)


@pytest.mark.parametrize("output_format", [HERMES, PLAIN])
def test_plain_text_passes_without_delay(output_format):
    router = make_router(output_format)
    for piece in ["Hel", "lo, ", "\n", "1 < 2", " <b>", "{", "\n\n  ", "</p>"]:
        assert router.feed(piece) == [ContentDelta(piece)]


@pytest.mark.parametrize(
    ("tail", "content"),
    [
        ("<|assistant|>", "Hi"),
        ("<|im_start|>assistant", "Hi"),
        ("<|im_start|>assistant\n", "\nHi"),
        ("<|im_start|>assistant\nSo", "\nHi"),
        ("<|im_start|>So", "\nHi"),
        ("", "\nHi"),
    ],
)
def test_a_reply_ends_the_line_that_the_prompt_leaves_open(tail, content):
    assert folded(run("\nHi", make_router(prompt_tail=tail)))[0] == content


def test_text_is_held_only_while_it_may_become_a_marker():
    router = make_router()
    assert router.feed("a <thi") == [ContentDelta("a ")]
    assert router.feed("s>") == [ContentDelta("<this>")]


def test_routers_do_not_mix():
    first, second = make_router(), make_router()
    text = '<think>\nhm\n</think>\n\nHi.<tool_call>{"name": "f"}</tool_call>'
    outputs = [(first.feed(char), second.feed(char)) for char in text]
    assert [[type(delta) for delta in left] for left, _ in outputs] == [
        [type(delta) for delta in right] for _, right in outputs
    ]
    ids = {d.call_id for left, right in outputs for d in left + right if hasattr(d, "call_id")}
    assert len(ids - {""}) == 2


def test_a_call_ends_the_thought_around_it():
    deltas = run(['hm\n<tool_call>{"name": "f"}</tool_call>'], make_router(prompt_tail=IN_THOUGHT))
    assert folded(deltas) == ("", "hm", {0: ("f", "{}")})


def test_completed_calls_are_counted_and_an_open_end_is_told():
    router = make_router()
    run(['<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f"'], router, truncated=True)
    assert router.completed_calls == {0}
    assert router.ended_mid_call


@pytest.mark.parametrize(
    ("end", "is_call"), [("\n<tool_ca", True), ("\n<", True), ("</tool", False), ("</th", False)]
)
def test_a_marker_that_the_end_of_a_cut_off_reply_begins_after_a_call_is_no_content(end, is_call):
    text, router = f'Sure.<tool_call>{{"name": "f"}}</tool_call>{end}', make_router()
    assert folded(run(text, router, truncated=True)) == ("Sure.", "", {0: ("f", "{}")})
    assert router.ended_mid_call is is_call
    assert folded(run(text))[0] == f"Sure.{end}"
    assert folded(run(f"{text} a", truncated=True))[0] == f"Sure.{end} a"


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=15), TAILS, st.booleans())
def test_the_cut_makes_no_difference(fragments, tail, truncated):
    text = "".join(fragments)
    outcomes = []
    for chunks in ([text], text, fragments):
        router = make_router(prompt_tail=tail)
        deltas = run(chunks, router, truncated=truncated)
        outcomes.append((folded(deltas), router.completed_calls, router.ended_mid_call))
    assert outcomes[0] == outcomes[1] == outcomes[2]


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=15), TAILS)
def test_nothing_is_lost_doubled_or_moved_but_markup(fragments, tail):
    words = [f"w{index}" for index in range(len(fragments))]
    text = "".join(word + fragment for word, fragment in zip(words, fragments, strict=True))
    deltas = run(text, make_router(prompt_tail=tail))
    assert re.findall(r"w\d+", in_order(deltas)) == re.findall(r"w\d+", text)


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=15), TAILS)
def test_without_calls_nothing_but_thought_markers_and_newlines_is_left_out(fragments, tail):
    text = "".join(fragments)
    deltas = run(text, make_router(tools={}, prompt_tail=tail))
    leavable = re.compile(r"</?think>|\n")
    assert leavable.sub("", in_order(deltas)) == leavable.sub("", text)


@given(st.text("<think>/ab\n", max_size=40))
def test_without_markers_every_character_passes(text):
    assert in_order(run(text, make_router(PLAIN))) == text


class BrokenCursor:
    """Takes everything in; raises at an exclamation mark."""

    is_mid_call = True

    def __init__(self, context):
        self._context = context
        self.held = context.opener

    def feed(self, text):
        if "!" in text:
            raise RuntimeError("a bug")
        if self.held == self._context.opener:
            self.held = text
            return ReaderOutput((self._context.calls.open("f"),))
        self.held += text
        return ReaderOutput()

    def finish(self, **_):
        raise RuntimeError("a bug")


BROKEN = OutputFormat(THINK, ToolFormat(name="broken", openers=("<call>",)))


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_format_that_raises_is_switched_off(size, caplog):
    text = "Hi <call> a b! c <think>d</think> <call> e"
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    deltas = run(chunks, make_router(BROKEN, reader=BrokenCursor))
    without_opener = [d for d in deltas if not isinstance(d, ToolCallDelta)]
    opener = "" if len(deltas) > len(without_opener) else "<call>"
    assert in_order(without_opener) == text.replace("<call>", opener, 1)
    (record,) = caplog.records
    assert "routing failed" in record.getMessage()


def test_a_format_that_cannot_begin_leaves_its_opener_as_text(caplog):
    router = make_router(BROKEN, reader=lambda _: 1 // 0)
    assert folded(run(["Hi <call>", " a"], router))[0] == "Hi <call> a"
    assert len(caplog.records) == 1


def test_a_format_that_raises_at_the_end_loses_nothing(caplog):
    deltas = run(["Hi ", "<call> a", " b"], make_router(BROKEN, reader=BrokenCursor))
    assert folded(deltas)[0] == "Hi  a b"
    assert len(caplog.records) == 1


def test_a_format_without_thoughts_leaves_their_markers_alone():
    family = OutputFormat(NO_REASONING, HERMES.tools)
    text = '<think>\n</think>\n<tool_call>{"name": "f"}</tool_call>'
    assert folded(run(text, make_router(family))) == ("<think>\n</think>\n", "", {0: ("f", "{}")})


CALL = '<tool_call>{"name": "f"}</tool_call>'
F_CALLED = {0: ("f", "{}")}


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"See:\n```\n{CALL}\n```\nSo.", f"See:\n```\n{CALL}\n```\nSo.", {}),
        (f"See:\n```\n{CALL}\n```", f"See:\n```\n{CALL}\n```", {}),
        (f"See `{CALL}` or `<think>`.", f"See `{CALL}` or `<think>`.", {}),
        ("See:\n```\n<think> <tool_call>x", "See:\n```\n<think> <tool_call>x", {}),
        (f"See:\n```\n{CALL}\n```\n{CALL}", f"See:\n```\n{CALL}\n```\n", F_CALLED),
        (f"Use `x`.{CALL}", "Use `x`.", F_CALLED),
        (f"So:\n```\n{CALL}\n```\n```\nx", f"So:\n```\n{CALL}\n```\n```\nx", {}),
        (f"A ` is no code\n{CALL}", "A ` is no code\n", F_CALLED),
    ],
)
def test_a_marker_in_code_is_text(text, content, calls, size):
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    assert folded(run(chunks)) == (content, "", calls)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_call_that_is_wrapped_in_a_fence_and_has_no_prose_before_it_is_a_call(size):
    text = f"```json\n{CALL}\n```\n"
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    assert folded(run(chunks)) == ("\n", "", F_CALLED)


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"```json\n{CALL}", ""),
        (f"~~~\n{CALL}\n~~~", ""),
        (f"```json\n{CALL}\n```\n```json\n{CALL}\n```\nSo.", "\nSo."),
        (f"<think>R</think>\n```\n{CALL}\n{CALL}\n```", ""),
        # Then the fence belongs to content.
        (f"```json\n{CALL}\nx\n```\nSo.", "```json\n\nx\n```\nSo."),
        (f"```json\n{CALL}\n``` x", "```json\n\n``` x"),
        (f"```py\nx\n```\n{CALL}", "```py\nx\n```\n"),
        ("```json\n[1]\n```", "```json\n[1]\n```"),
        ('```json\n<tool_call>{"name": "g"}\n```', '```json\n<tool_call>{"name": "g"}\n```'),
        ("```json\n", "```json\n"),
        ("``", "``"),
    ],
)
def test_a_fence_with_nothing_but_calls_is_not_shown(text, content, size):
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    assert folded(run(chunks))[0] == content


def test_a_fence_that_is_cut_off_where_a_call_may_follow_is_not_shown():
    for text in (f"```json\n{CALL}\n``", f"```json\n{CALL}\n```", "```json\n", "```js"):
        assert folded(run(text, truncated=True))[0] == ""
    assert folded(run("```json\n[", truncated=True))[0] == "```json\n["
    assert folded(run("```json\n", make_router(tools={})))[0] == "```json\n"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_call_in_a_fence_that_never_closes_is_a_call_unless_the_reply_was_cut_off(size):
    text = f"So:\n```\nx = 1\n{CALL} y"
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    assert folded(run(chunks)) == ("So:\n```\nx = 1\n y", "", F_CALLED)
    assert folded(run(chunks, truncated=True)) == (text, "", {})


def test_code_that_only_mentions_a_marker_is_not_held_up():
    router = make_router()
    assert (
        in_order(router.feed("See:\n```\nx = '<tool_call>'\ny"))
        == "See:\n```\nx = '<tool_call>'\ny"
    )
    assert in_order(router.feed(" = 1\n")) == " = 1\n"


def test_a_format_that_raises_on_quoted_text_loses_nothing(caplog):
    deltas = run(["See:\n```\n<call> a", " b!", " c"], make_router(BROKEN, reader=BrokenCursor))
    assert folded(deltas)[0] == "See:\n```\n<call> a b! c"
    assert len(caplog.records) == 1


class BareCursor:
    """Knows one call, `{"name": "f"}`, after its brace."""

    is_mid_call = True
    BODY = '"name": "f"}'

    def __init__(self, context):
        self._context = context
        self._text = ""

    @property
    def held(self):
        return self._context.opener + self._text

    def feed(self, text):
        self._text += text
        if self._text.startswith(self.BODY):
            calls = self._context.calls
            deltas = (calls.open("f"), calls.extend("{}"))
            return ReaderOutput(deltas, rest=self._text.removeprefix(self.BODY))
        if self.BODY.startswith(self._text):
            return ReaderOutput()
        return ReaderOutput(rejected=self._context.opener, rest=self._text)

    def finish(self, **_):
        return ReaderOutput(rejected=self.held)


LEADING = OutputFormat(THINK, ToolFormat(name="bare", leads=("{",)))


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ('{"name": "f"}', "", "", F_CALLED),
        ('\n {"name": "f"}', "\n ", "", F_CALLED),
        ('<think>{"name": "f"}</think>\n{"name": "f"}', "", '{"name": "f"}', F_CALLED),
        ('So: {"name": "f"}', 'So: {"name": "f"}', "", {}),
        ('{"a": 1} {"name": "f"}', '{"a": 1} {"name": "f"}', "", {}),
        ('{"na', '{"na', "", {}),
    ],
)
def test_a_format_without_an_opener_begins_where_content_begins(
    text, content, reasoning, calls, size
):
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    assert folded(run(chunks, make_router(LEADING, reader=BareCursor))) == (
        content,
        reasoning,
        calls,
    )


class FramedCursor:
    """Owns a reply of lines: `T` thought, `A` answer, `C` call."""

    held = ""
    is_mid_call = False

    def __init__(self, context):
        self._calls = context.calls
        self.began_with = (context.opener, context.in_thought, context.prompt_tail)
        self._line = ""

    def feed(self, text):
        *lines, self._line = (self._line + text).split("\n")
        return ReaderOutput(tuple(delta for line in lines for delta in self._deltas(line)))

    def finish(self, *, truncated):
        return ReaderOutput(() if truncated else tuple(self._deltas(self._line)))

    def _deltas(self, line):
        match line[:1]:
            case "T":
                yield ReasoningDelta(line[1:])
            case "A":
                yield ContentDelta(line[1:])
            case "C":
                yield self._calls.open(line[1:])
                yield self._calls.extend("{}")
                self._calls.complete()


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_format_may_own_the_whole_reply(size):
    tools = ToolFormat(name="framed", owns_reply=True)
    router = make_router(OutputFormat(THINK, tools), reader=FramedCursor)
    text = "T<think>\nA<tool_call>\nCf\nAbye"
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    assert folded(run(chunks, router)) == ("<tool_call>bye", "<think>", F_CALLED)
    assert router.completed_calls == {0}


def test_a_format_that_owns_the_reply_knows_how_the_prompt_ended():
    made = []

    def make(context):
        made.append(FramedCursor(context))
        return made[-1]

    tools = ToolFormat(name="framed", owns_reply=True)
    run([], make_router(OutputFormat(THINK, tools), {}, prompt_tail=IN_THOUGHT, reader=make))
    assert [cursor.began_with for cursor in made] == [("", True, IN_THOUGHT)]


def test_a_format_may_leave_calls_inside_a_thought_alone():
    family = replace(HERMES.tools, ends_thought=False)
    router = make_router(OutputFormat(THINK, family), prompt_tail=IN_THOUGHT)
    assert folded(run([f"hm {CALL}</think>{CALL}"], router)) == ("", f"hm {CALL}", F_CALLED)


def test_frames_around_an_answer_are_left_out():
    framed = ReasoningFormat(
        name="framed", starts=("<think>", "<T>"), ends=("</think>",), frames=("<A>", "</A>")
    )
    text = "<T>hm</think><A>Hi `<A>`.</A>"
    router = make_router(OutputFormat(framed, HERMES.tools))
    assert folded(run(text, router)) == ("Hi `<A>`.", "hm", {})


def test_newlines_before_the_first_marker_belong_to_it():
    assert folded(run("\n<think>hm</think>\n\nHi")) == ("Hi", "hm", {})
    assert folded(run(f"\n\n{CALL}")) == ("", "", F_CALLED)
    assert folded(run("\n\n")) == ("\n\n", "", {})


EMPTY = {
    "cohere": "<|START_ACTION|>[]<|END_ACTION|>",
    "nemotron": "<TOOLCALL>[ ]</TOOLCALL>",
    "json_list": "<tool_calls>\n[]\n</tool_calls>",
    "hermes_json": "<tool_call>\n{}\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|>\n<|tool_calls_section_end|>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
    "apertus": "<|tools_prefix|>[]<|tools_suffix|>",
    "pythonic": "<|tool_call_start|>[]<|tool_call_end|>",
    "gemma4": "<|tool_call><tool_call|>",
    "granite": "<|tool_call|>[]",
    "mistral": "[TOOL_CALLS][]",
    "phi4": "functools[]",
    "hyperclovax": " -> tool/function_call\n[]",
}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize(
    ("before", "after"), [("", ""), ("Hi.\n", ""), ("", " Bye."), ("Hi.\n", "\nBye.")]
)
def test_a_block_without_calls_is_not_shown(name, before, after):
    text = before + EMPTY[name] + after
    for chunks in ([text], text):
        router = make_router(named_format(f"{name}!", "none"))
        assert folded(run(chunks, router)) == (before + after, "", {})


@pytest.mark.parametrize("name", EMPTY)
def test_a_block_without_calls_is_text_within_a_line(name):
    text = f"Write {EMPTY[name]} if there is nothing."
    assert folded(run(text, make_router(named_format(f"{name}!", "none"))))[0] == text


@pytest.mark.parametrize("before", ["", "Hello.<|end_message|><|message_model|>"])
@pytest.mark.parametrize("namespace", ["", "functions.", "tools.", "default_api."])
def test_the_author_of_a_call_of_inkling_may_have_a_namespace(before, namespace):
    opener = "<|content_invoke_tool_json|>"
    call = f'{namespace}f{opener}{{"name": "f", "args": {{}}}}<|end_message|>'
    for chunks in ([before + call], before + call):
        router = make_router(named_format("inkling", "inkling_thinking"))
        assert folded(run(chunks, router)) == (before.partition("<")[0], "", {0: ("f", "{}")})
