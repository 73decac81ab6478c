"""Every format on random pieces of its own golden cases."""

import logging
import re

import golden
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.core.step import ContentDelta, ReasoningDelta, ToolCallDelta
from backend.formats.registry import TOOL_FORMATS
from backend.output.router import Router

BUILT = [row for row in TOOL_FORMATS if row.readings]
PIECE = re.compile(r"<[^<>]*>|\[[A-Z_/]+\]|[^<\[]{1,12}|.", re.DOTALL)
STRING_VALUE = re.compile(r': "(\w+)"')
CASES = golden.cases()

# There are forty formats: a third of the usual examples is enough for each.
several = settings(max_examples=settings.default.max_examples // 3)


def fragments(tools):
    texts = [case.text for case in CASES if case.spec.format.tools is tools]
    return sorted({piece for text in texts for piece in PIECE.findall(text)})


def run(case, chunks, tools, *, truncated=False):
    router = Router(case.spec.format, tools=tools, prompt_tail=case.spec.prompt_tail)
    deltas = [delta for chunk in chunks for delta in router.feed(chunk)]
    deltas += router.finish(truncated=truncated)
    calls = {}
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            name, arguments = calls.get(delta.index, ("", ""))
            calls[delta.index] = (name + delta.name, arguments + delta.arguments)
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    return content, reasoning, calls, router.completed_calls, router.ended_mid_call


@pytest.mark.slow
@pytest.mark.parametrize("tools", BUILT, ids=lambda tools: tools.name)
def test_no_text_makes_a_format_raise_or_depend_on_the_cut(tools, caplog):
    cases = [case for case in CASES if case.spec.format.tools is tools]

    @several
    @given(
        st.sampled_from(cases),
        st.lists(st.sampled_from(fragments(tools)), max_size=15),
        st.booleans(),
    )
    def check(case, pieces, truncated):
        text = "".join(pieces)
        offered = case.spec.tools
        whole = run(case, [text], offered, truncated=truncated)
        assert run(case, text, offered, truncated=truncated) == whole
        assert run(case, pieces, offered, truncated=truncated) == whole
        assert all(record.levelno < logging.ERROR for record in caplog.records)

    check()


@pytest.mark.parametrize("tools", BUILT, ids=lambda tools: tools.name)
def test_without_tools_nothing_is_a_call(tools):
    for case in [case for case in CASES if case.spec.format.tools is tools]:
        content, reasoning, calls, *_ = run(case, [case.text], {})
        assert not calls, case.case_id
        # A repair may write values in another way than the model did.
        for _, arguments in () if "drift" in case.case_id else case.tool_calls:
            texts = STRING_VALUE.findall(arguments)
            assert all(text in content + reasoning for text in texts), case.case_id


@pytest.mark.slow
@pytest.mark.parametrize(
    "tools", [tools for tools in BUILT if not tools.owns_reply], ids=lambda tools: tools.name
)
def test_without_tools_every_character_of_a_format_is_text(tools):
    @several
    @given(st.lists(st.sampled_from(fragments(tools)), max_size=15))
    def check(pieces):
        case = next(case for case in CASES if case.spec.format.tools is tools)
        family = case.spec.format.reasoning
        text = "".join(pieces)
        content, reasoning, calls, *_ = run(case, text, {})
        left_out = [*family.marks, *family.first_starts, *case.spec.format.boxes, "\n"]
        leavable = re.compile("|".join(map(re.escape, left_out)))
        kept = leavable.sub("", content + reasoning)
        assert sorted(kept) == sorted(leavable.sub("", text))
        assert not calls

    check()
