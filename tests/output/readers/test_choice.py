import pytest

from backend.core.step import ContentDelta
from backend.output.readers.build import ChoiceReader
from backend.output.readers.reader import CallLedger, ReaderContext, ReaderOutput


class EchoCursor:
    """Hands out the text that it is fed, after its own name."""

    is_mid_call = False
    held = "held"

    def __init__(self, name):
        self._name = name

    def feed(self, text):
        return ReaderOutput((ContentDelta(self._name + text),))

    def finish(self, *, truncated):
        return ReaderOutput(rejected=f"{self._name} {truncated}")


def make_cursor():
    context = ReaderContext(opener="<o>", calls=CallLedger({}), in_thought=False)
    choices = {"{": lambda _: EchoCursor("json:"), "<f=": lambda _: EchoCursor("tags:")}
    return ChoiceReader(context, choices=choices, otherwise=lambda _: EchoCursor("else:"))


@pytest.mark.parametrize(
    ("text", "family"), [("{", "json:"), (" \n{1", "json:"), ("\n<f=", "tags:"), ("<g", "else:")]
)
def test_what_follows_the_opener_decides(text, family):
    for size in (1, 2, len(text)):
        cursor = make_cursor()
        chunks = [text[start : start + size] for start in range(0, len(text), size)]
        said = [delta.text for chunk in chunks for delta in cursor.feed(chunk).deltas]
        assert said[0].startswith(family)
        assert "".join(said).replace(family, "") == text


def test_before_the_choice_everything_is_held():
    cursor = make_cursor()
    assert cursor.feed(" <f") == ReaderOutput()
    assert (cursor.held, cursor.is_mid_call) == ("<o> <f", True)
    assert cursor.finish(truncated=True) == ReaderOutput()
    assert cursor.finish(truncated=False) == ReaderOutput(rejected="<o> <f")


def test_after_the_choice_the_reader_answers():
    cursor = make_cursor()
    cursor.feed("{")
    assert (cursor.held, cursor.is_mid_call) == ("held", False)
    assert cursor.finish(truncated=True).rejected == "json: True"
