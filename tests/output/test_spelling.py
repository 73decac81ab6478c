"""Earlier calls that a template leaves out are written as their family writes them."""

import json

import pytest

from backend.core.step import ToolCallDelta
from backend.formats.format import NO_REASONING
from backend.formats.registry import TOOL_FORMATS
from backend.formats.spelling import PLAIN
from backend.formats.thoughts import THINK
from backend.output.detection import spelling_of
from backend.output.reply_format import OutputFormat
from backend.output.router import Router

ARGUMENTS = {
    "text": ' a\n"q" \\ it\'s ü→😀 </x>, b=c',
    "marks": THINK.end,
    "nested": {"list": [1, -2.5, None, {"k v": True}], "empty": {}},
    "flag": False,
}
CALLS = [{"name": "f", "arguments": ARGUMENTS}, {"name": "fs/read_file", "arguments": {}}]


def has_all(_):
    return True


SPELLED = {
    f"{each.name}, {'its markers' if has else 'no marker'}": (each, spelling)
    for each in TOOL_FORMATS
    for has in (None, has_all)
    if (spelling := spelling_of(each, *filter(None, [has])))
}


@pytest.mark.parametrize(("tool_format", "spelling"), SPELLED.values(), ids=SPELLED)
def test_its_reader_reads_what_was_written(tool_format, spelling):
    text = spelling.written(CALLS[: tool_format.most_calls])
    assert THINK.end not in text
    assert read(tool_format, text) == CALLS[: tool_format.most_calls]


def read(tool_format, text):
    router = Router(OutputFormat(NO_REASONING, tool_format), tools={"f": {}, "fs/read_file": {}})
    found = {}
    for delta in [*router.feed(text), *router.finish(truncated=False)]:
        assert isinstance(delta, ToolCallDelta), delta
        call = found.setdefault(delta.index, {"name": "", "arguments": ""})
        call["name"] += delta.name
        call["arguments"] += delta.arguments
    return [{**call, "arguments": json.loads(call["arguments"])} for call in found.values()]


@pytest.mark.parametrize(
    "arguments", ["no JSON", {"a b": 1}], ids=["a text", "a name with a space"]
)
def test_what_a_family_cannot_write_is_plain_json(arguments):
    (olmo,) = (each for each in TOOL_FORMATS if each.name == "olmo3")
    call = {"name": "f", "arguments": arguments}
    assert spelling_of(olmo).written([call]) == PLAIN.written([call]) == json.dumps(call)
