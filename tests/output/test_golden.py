import json
import re
from itertools import pairwise

import golden
import pytest

from backend.core.delta import ContentDelta, FinishReason, ReasoningDelta, ToolCallDelta

CASES = list(golden.cases())


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
    for position in range(1, len(text)):
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
    for length in range(len(case.text)):
        calls = golden.named_calls(
            golden.play(case.spec, [case.text[:length]], FinishReason.LENGTH)
        )
        for (name, arguments), whole in zip(calls, complete, strict=False):
            assert name == whole[0]
            assert whole[1].startswith(arguments)
            assert arguments == whole[1] or not is_json_object(arguments)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_cut_off_reply_begins_like_the_whole(case):
    whole = golden.play(case.spec, case.text)
    for length in range(len(case.text)):
        part = golden.play(case.spec, [case.text[:length]], FinishReason.LENGTH)
        assert whole.content.startswith(without_half_a_marker(part.content))
        assert whole.reasoning.startswith(without_half_a_marker(part.reasoning))


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


def test_every_built_format_has_golden_cases():
    wires = {case.spec.format.tools.name for case in CASES}
    thoughts = {case.spec.format.reasoning.name for case in CASES}
    assert wires == {"none", "hermes_json"}
    assert thoughts == {"none", "think"}


def without_half_a_marker(text):
    """Half a marker is text when the rest never comes."""
    return re.sub(r"\s*<[a-z_/]*\Z", "", text)


def is_json_object(text):
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
