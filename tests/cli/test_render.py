from io import StringIO

import pytest
from rich.console import Console

from backend.cli.render import ReplyPrinter, named_pictures, printable, statistics
from backend.core.step import ContentDelta, ReasoningDelta, ToolCallDelta, Usage

DIM_ITALIC = "\x1b[2;3m"


def printed(console, *deltas):
    with ReplyPrinter(console) as printer:
        for delta in deltas:
            printer.show(delta)
    return console.file.getvalue()


@pytest.fixture
def terminal():
    return Console(file=StringIO(), width=60, force_terminal=True, color_system="standard")


def test_text_appears_as_it_arrives(console):
    with ReplyPrinter(console) as printer:
        printer.show(ContentDelta("Hel"))
        assert console.file.getvalue() == "Hel"
        printer.show(ContentDelta("lo"))
    assert console.file.getvalue() == "Hello\n"


def test_thought_and_content_stand_on_lines_of_their_own(console):
    text = printed(console, ReasoningDelta("h"), ReasoningDelta("m\n"), ContentDelta("\n\nHi"))
    assert text == "hm\nHi\n"


def test_only_the_thought_is_dim(terminal):
    thought, content = printed(terminal, ReasoningDelta("hm"), ContentDelta("Hi")).splitlines()
    assert thought.startswith(DIM_ITALIC)
    assert content == "Hi"


def test_a_call_without_a_terminal_is_one_whole_box(console):
    text = printed(console, ToolCallDelta(0, "a", "f"), ToolCallDelta(0, arguments='{"x": 1}'))
    assert text.count('f({"x": 1})') == 1
    assert "tool call" in text


def test_a_call_on_a_terminal_grows(terminal):
    text = printed(terminal, ToolCallDelta(0, "a", "f"), ToolCallDelta(0, arguments='{"x": 1}'))
    assert text.index("f()") < text.index('f({"x": 1})')


def test_two_calls_have_two_boxes(console):
    text = printed(console, ToolCallDelta(0, "a", "f", "{}"), ToolCallDelta(1, "b", "g", "{}"))
    assert text.count("tool call") == 2
    assert text.index("f({})") < text.index("g({})")


def test_content_after_a_call_stands_below_its_box(console):
    text = printed(console, ToolCallDelta(0, "a", "f", "{}"), ContentDelta("Hi"))
    assert text.splitlines()[-1] == "Hi"


def test_markup_in_a_reply_is_text(console):
    assert printed(console, ContentDelta("[red]x[/red]")) == "[red]x[/red]\n"


def test_a_model_cannot_steer_the_terminal():
    assert printable("a\x1b[2Jb\x9bc\rd\te\n") == "a[2Jbcd\te\n"


def test_statistics_tell_counts_and_speed():
    usage = Usage(prompt_tokens=30, completion_tokens=20, decode_ms=500.0)
    assert statistics(usage) == "20 tokens · 40.0 tokens/s · 30 prompt tokens"


def test_a_speed_that_was_not_measured_is_left_out():
    assert statistics(Usage(completion_tokens=1)) == "1 tokens · 0 prompt tokens"


def test_words_that_name_no_picture_are_text(tmp_path):
    picture = tmp_path / "cat.png"
    picture.touch()
    words = f"it costs ~5 dollars, ~5.png, {'x' * 300}.png and {picture}"
    assert list(named_pictures(words)) == [picture]
