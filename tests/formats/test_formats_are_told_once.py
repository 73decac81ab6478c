"""Every marker of a format stands in one place: its section of a dialect's file."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import golden
import pytest
from tool_replies import FORMATS

from backend.formats.dialects import Literals, Tags
from backend.formats.registry import REASONING_FORMATS, TOOL_FORMATS

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "backend" / "formats"
GUIDE = (ROOT / "docs" / "guides" / "structured-output.md").read_text(encoding="utf-8")
# Shorter markers are parts of other texts.
SHORT = 4
TOLD_ELSEWHERE = {
    # Texts of other meanings that happen to be the same.
    "[",
    "{",
}


def sources(*packages):
    for package in packages:
        for path in sorted((ROOT / "backend" / package).rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def literals(tree):
    """Yield the texts in a module, docstrings aside."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in docstrings:
            yield node.value


def markers():
    for tools in TOOL_FORMATS:
        yield from (*tools.openers, *tools.closers, *tools.tokens)
    for thoughts in REASONING_FORMATS:
        yield from (*thoughts.starts, *thoughts.ends, *thoughts.frames, *thoughts.tokens)


MARKERS = {marker.strip() for marker in markers()} - TOLD_ELSEWHERE


def test_no_marker_is_spelled_outside_of_the_formats():
    spelled = defaultdict(set)
    for path, tree in sources("output", "sampling", "pipeline", "engine", "rpc"):
        for text in literals(tree):
            plain = text.replace("\\", "").strip()
            for marker in MARKERS:
                is_part = len(marker) > SHORT and marker in plain and path.parts[-2] != "pipeline"
                if plain == marker or is_part:
                    spelled[marker].add(path.name)
    assert not spelled


def sections():
    """Yield the parts of the files of formats, which begin with a comment at the margin."""
    for path in sorted(SOURCES.glob("*.py")):
        for number, text in enumerate(re.split(r"\n\n(?=# )", path.read_text(encoding="utf-8"))):
            yield f"{path.name}, section {number}", ast.parse(text)


def test_a_format_spells_each_of_its_markers_once():
    for name, tree in sections():
        found = [text.strip() for text in literals(tree) if text.strip() in MARKERS]
        assert len(found) == len(set(found)), name


def formats_in(tree):
    """Yield the names of the formats that a section makes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            texts = [*node.args[:1], *(word.value for word in node.keywords if word.arg == "name")]
            yield from (text.value for text in texts if isinstance(text, ast.Constant))


@pytest.mark.parametrize("tools", TOOL_FORMATS[:-1], ids=lambda tools: tools.name)
def test_a_format_is_one_section_and_one_golden_file(tools):
    assert len([name for name, tree in sections() if tools.name in formats_in(tree)]) == 1
    assert (golden.GOLDEN / f"{tools.name}.jsonl").is_file()
    assert any(tools.is_called(reply.parser or name) for name, reply in FORMATS.items())
    page = (ROOT / "docs" / "reference" / "output-formats.md").read_text(encoding="utf-8")
    assert re.search(rf"`{tools.name}`", page)


def named(text):
    """Return the formats that a piece of the guide names."""
    names = set(re.findall(r"`(\w+)`", text))
    return names & {tools.name for tools in TOOL_FORMATS}


def kind(tools):
    """Return the row of the guide in which a format belongs."""
    match tools.frames[0].dialect:
        case Tags(mark=mark):
            return "elements" if mark else "raw values"
        case Literals(sorts_names=is_in_braces):
            return "braces" if is_in_braces else "Python"
    return "JSON"


def test_the_guide_names_every_format_whose_arguments_are_not_json():
    table = re.search(
        r"^\| formats \| arguments \|\n\|.*?\n(.*?)\n\n", GUIDE, re.MULTILINE | re.DOTALL
    )
    *rows, others = [row.split("|")[1] for row in table[1].splitlines()]
    built = [tools for tools in TOOL_FORMATS if tools.frames]
    assert others.strip() == "all others"
    assert list(map(named, rows)) == [
        {tools.name for tools in built if kind(tools) == of}
        for of in ("raw values", "elements", "braces", "Python")
    ]


def test_the_guide_tells_where_text_may_stand_between_calls_and_where_there_is_one():
    between = re.search(r"Text may stand between calls.*?elsewhere", GUIDE, re.DOTALL)
    built = [tools for tools in TOOL_FORMATS if tools.frames]
    assert named(between[0]) == {
        tools.name
        for tools in built
        if any(not frame.is_block and not frame.is_lapse for frame in tools.frames)
    }
    one = re.search(r"room for one call in (.*?)\.", GUIDE, re.DOTALL)
    assert named(one[0]) == {tools.name for tools in built if tools.most_calls == 1}
