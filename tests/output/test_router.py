import re

import pytest
from golden import named_format
from hypothesis import given
from hypothesis import strategies as st

from backend.core.delta import ContentDelta, ReasoningDelta, ToolCallDelta
from backend.output.format import NO_REASONING, THINK, OutputFormat, ToolFormat
from backend.output.router import Router
from backend.output.tool_calls.wire import WireOutput

HERMES = named_format("hermes", "think")
PLAIN = named_format("none", "none")
NAMES = frozenset({"f", "get_weather"})
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<", "</t", "<to"]
CALLS = ['{"name": "f", "arguments": {}}', '{"name": "f", ', '"arguments": {"a": "']
CALLS += ['{"arguments": ', '"name": "f"}', "}}", "{", "}", "[", "]", '"', "\\", ","]
FRAGMENTS = [*MARKERS, *CALLS, "\n", " ", "é", "word"]


def make_router(output_format=HERMES, tool_names=NAMES, *, opens_in_reasoning=False):
    return Router(output_format, tool_names=tool_names, opens_in_reasoning=opens_in_reasoning)


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
def test_plain_text_passes_without_delay(output_format):  # lesson 77
    router = make_router(output_format)
    for piece in ["Hel", "lo, ", "\n", "1 < 2", " <b>", "{", "\n\n  ", "</p>"]:
        assert router.feed(piece) == [ContentDelta(piece)]


def test_text_is_held_only_while_it_may_become_a_marker():
    router = make_router()
    assert router.feed("a <thi") == [ContentDelta("a ")]
    assert router.feed("s>") == [ContentDelta("<this>")]


def test_routers_do_not_mix():  # lesson 78
    first, second = make_router(), make_router()
    text = '<think>\nhm\n</think>\n\nHi.<tool_call>{"name": "f"}</tool_call>'
    outputs = [(first.feed(char), second.feed(char)) for char in text]
    assert [[type(delta) for delta in left] for left, _ in outputs] == [
        [type(delta) for delta in right] for _, right in outputs
    ]
    ids = {d.call_id for left, right in outputs for d in left + right if hasattr(d, "call_id")}
    assert len(ids - {""}) == 2


def test_a_call_ends_the_thought_around_it():
    deltas = run(['hm\n<tool_call>{"name": "f"}</tool_call>'], make_router(opens_in_reasoning=True))
    assert folded(deltas) == ("", "hm", {0: ("f", "{}")})


def test_completed_calls_are_counted_and_an_open_end_is_told():
    router = make_router()
    run(['<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f"'], router, truncated=True)
    assert router.completed_calls == {0}
    assert router.ended_mid_call


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=15), st.booleans(), st.booleans())
def test_the_cut_makes_no_difference(fragments, opens_in_reasoning, truncated):
    text = "".join(fragments)
    outcomes = []
    for chunks in ([text], text, fragments):
        router = make_router(opens_in_reasoning=opens_in_reasoning)
        deltas = run(chunks, router, truncated=truncated)
        outcomes.append((folded(deltas), router.completed_calls, router.ended_mid_call))
    assert outcomes[0] == outcomes[1] == outcomes[2]


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=15), st.booleans())
def test_nothing_is_lost_doubled_or_moved_but_markup(fragments, opens_in_reasoning):
    words = [f"w{index}" for index in range(len(fragments))]
    text = "".join(word + fragment for word, fragment in zip(words, fragments, strict=True))
    deltas = run(text, make_router(opens_in_reasoning=opens_in_reasoning))
    assert re.findall(r"w\d+", in_order(deltas)) == re.findall(r"w\d+", text)


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=15), st.booleans())
def test_without_calls_nothing_but_thought_markers_and_newlines_is_left_out(fragments, opens):
    text = "".join(fragments)
    deltas = run(text, make_router(tool_names=frozenset(), opens_in_reasoning=opens))
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
            return WireOutput((self._context.calls.open("f"),))
        self.held += text
        return WireOutput()

    def finish(self, **_):
        raise RuntimeError("a bug")


BROKEN = OutputFormat(THINK, ToolFormat("broken", ("<call>",), ("<call>",), BrokenCursor))


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_wire_that_raises_is_switched_off(size, caplog):  # lessons 75, 80, 81, 90
    text = "Hi <call> a b! c <think>d</think> <call> e"
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    deltas = run(chunks, make_router(BROKEN))
    without_opener = [d for d in deltas if not isinstance(d, ToolCallDelta)]
    opener = "" if len(deltas) > len(without_opener) else "<call>"
    assert in_order(without_opener) == text.replace("<call>", opener, 1)
    assert [bool(record.exc_info) for record in caplog.records] == [True]


def test_a_wire_that_cannot_begin_leaves_its_opener_as_text(caplog):
    broken = OutputFormat(THINK, ToolFormat("broken", ("<call>",), ("<call>",), lambda _: 1 // 0))
    assert folded(run(["Hi <call>", " a"], make_router(broken)))[0] == "Hi <call> a"
    assert len(caplog.records) == 1


def test_a_wire_that_raises_at_the_end_loses_nothing(caplog):
    deltas = run(["Hi ", "<call> a", " b"], make_router(BROKEN))
    assert folded(deltas)[0] == "Hi  a b"
    assert len(caplog.records) == 1


def test_a_format_without_thoughts_leaves_their_markers_alone():
    wire = OutputFormat(NO_REASONING, HERMES.tools)
    text = '<think>\n</think>\n<tool_call>{"name": "f"}</tool_call>'
    assert folded(run(text, make_router(wire))) == ("<think>\n</think>\n", "", {0: ("f", "{}")})
