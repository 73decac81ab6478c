import json
from functools import cache
from itertools import pairwise

import golden
import pytest

from backend.core.delta import ContentDelta, FinishReason, ReasoningDelta, ToolCallDelta
from backend.output.format import ToolFormat
from backend.output.reasoning_rows import REASONING_ROWS
from backend.output.tool_rows import TOOL_ROWS

CASES = list(golden.cases())
MAX_CUTS = 200
# The thoughts of the first three are tested with the wire that owns the reply.
UNTESTED = {"harmony", "xtml_think", "muse", "none"}


def outcome(case, chunks):
    completion = golden.play(case.spec, chunks, case.stop)
    calls = golden.named_calls(completion)
    return completion.content, completion.reasoning, calls, completion.finish.reason


def expected(case):
    return case.content, case.reasoning, case.tool_calls, case.finish_reason


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_whole_text_gives_what_is_expected(case):  # lessons 71, 72, 75, 76, 84, 85, 99, 105, 106
    assert outcome(case, [case.text]) == expected(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cut_makes_no_difference(case):
    text = case.text
    assert outcome(case, text) == expected(case)
    for position in cuts(text):
        assert outcome(case, [text[:position], text[position:]]) == expected(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exactly_one_finish_ends_the_stream(case):  # lesson 89
    finishes = [finish for _, finish in golden.stream(case.spec, case.text, case.stop)]
    assert [finish is not None for finish in finishes] == [False] * len(case.text) + [True]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_arguments_of_finished_calls_are_valid_json(case):
    calls = golden.play(case.spec, case.text, case.stop).tool_calls
    if case.finish_reason is FinishReason.TOOL_CALLS:
        assert all(is_json_object(call.arguments) for call in calls)
    assert len({call.call_id for call in calls}) == len(calls)
    assert [call.index for call in calls] == list(range(len(calls)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_cut_off_call_is_handed_out_as_complete(case):
    complete = golden.named_calls(golden.play(case.spec, case.text))
    for length in cuts(case.text):
        calls = golden.named_calls(cut_off(case, length))
        for (name, arguments), whole in zip(calls, complete, strict=False):
            assert name == whole[0]
            assert whole[1].startswith(arguments)
            assert arguments == whole[1] or not is_json_object(arguments)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_cut_off_reply_begins_like_the_whole(case):
    whole = golden.play(case.spec, case.text)
    for length in cuts(case.text):
        part = cut_off(case, length)
        assert whole.content.startswith(without_half_a_marker(part.content, case))
        assert whole.reasoning.startswith(without_half_a_marker(part.reasoning, case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_whole_reply_is_the_fold_of_its_stream(case):  # lessons 1, 3
    content, reasoning, arguments = "", "", {}
    for deltas, _ in golden.stream(case.spec, case.text, case.stop):
        for delta in deltas:
            match delta:
                case ContentDelta(text):
                    content += text
                case ReasoningDelta(text):
                    reasoning += text
                case ToolCallDelta():
                    arguments[delta.index] = arguments.get(delta.index, "") + delta.arguments
    calls = tuple(arguments[index] for index in sorted(arguments))
    assert content == case.content
    assert reasoning == case.reasoning
    assert calls == tuple(whole for _, whole in case.tool_calls)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_neighbours_of_one_kind_are_one_delta(case):
    for deltas, _ in golden.stream(case.spec, [case.text]):
        kinds = [(type(delta), getattr(delta, "index", 0)) for delta in deltas]
        assert all(first != second for first, second in pairwise(kinds))


@pytest.mark.parametrize("row", [*TOOL_ROWS, *REASONING_ROWS], ids=lambda row: row.format.name)
def test_every_built_format_has_golden_cases(row):
    if isinstance(row.format, ToolFormat):
        expected = 10 if row.format.make_cursor else 0
        found = [case for case in CASES if case.spec.format.tools is row.format]
    else:
        expected = 0 if row.format.name in UNTESTED else 5
        found = [case for case in CASES if case.spec.format.reasoning is row.format]
    assert len(found) >= expected


def cuts(text):
    """Return where to cut: everywhere, or at evenly spread places of a long text."""
    return range(1, len(text), len(text) // MAX_CUTS + 1)


@cache
def cut_off(case, length):
    return golden.play(case.spec, [case.text[:length]], FinishReason.LENGTH)


def without_half_a_marker(text, case):
    """Half a marker, or what stands before one, is text when the rest never comes."""
    if not text.strip():
        return ""
    wire = case.spec.format
    markers = [*wire.markers, *wire.tools.leads]
    for start in range(max(0, len(text) - 40), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return text[:start].rstrip()
    return text


def is_json_object(text):
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
