import json
import re
from functools import cache
from itertools import chain, groupby, pairwise

import golden
import pytest

from backend.core.step import ContentDelta, FinishReason, ReasoningDelta, ToolCallDelta
from backend.formats.format import ToolFormat
from backend.formats.registry import REASONING_FORMATS, TOOL_FORMATS

CASES = golden.cases()
FILES = {
    name: list(cases)
    for name, cases in groupby(CASES, key=lambda case: case.case_id.partition("/")[0])
}
MAX_SPREAD_CUTS = 20 if golden.is_long() else 6
MARKER = re.compile(r"<[^<>\s]{1,40}>?|\[/?[A-Z_]+\]|◁[^▷]*▷|[`\"]{3}")
# The thoughts of the first three are tested with the family that owns the reply.
UNTESTED = {"harmony", "xtml_think", "muse", "none"}

# A test per file, not per case: there are thousands of these, and most take less than a test.
for_each_file = pytest.mark.parametrize("cases", FILES.values(), ids=FILES)


def outcome(case, chunks):
    completion = golden.play(case.spec, chunks, case.stop)
    calls = golden.named_calls(completion)
    return completion.content, completion.reasoning, calls, completion.finish.reason


def expected(case):
    return case.content, case.reasoning, case.tool_calls, case.finish_reason


@for_each_file
def test_a_whole_text_gives_what_is_expected(cases):
    for case in cases:
        assert outcome(case, [case.text]) == expected(case), case.case_id


@pytest.mark.slow
@for_each_file
@pytest.mark.one_in(2)
def test_the_cut_makes_no_difference(cases):
    for case in cases:
        assert outcome(case, case.text) == expected(case), f"{case}, character by character"
    for case, position in cuts(cases):
        halves = [case.text[:position], case.text[position:]]
        assert outcome(case, halves) == expected(case), f"{case}, cut at {position}"


@for_each_file
def test_exactly_one_finish_ends_the_stream(cases):
    for case in cases:
        is_end = [finish is not None for _, finish in streamed(case)]
        assert is_end == [False] * len(case.text) + [True], case.case_id


@for_each_file
def test_arguments_of_finished_calls_are_valid_json(cases):
    for case in cases:
        calls = golden.replay.fold(streamed(case)).tool_calls
        if case.finish_reason is FinishReason.TOOL_CALLS:
            assert all(is_json_object(call.arguments) for call in calls), case.case_id
        assert len({call.call_id for call in calls}) == len(calls), case.case_id
        assert [call.index for call in calls] == list(range(len(calls))), case.case_id


@pytest.mark.slow
@for_each_file
@pytest.mark.one_in(2)
def test_a_cut_off_reply_begins_like_the_whole(cases):
    for case, length in cuts(cases):
        whole = stopped(case)
        part = golden.play(case.spec, [case.text[:length]], FinishReason.LENGTH)
        place = f"{case}, cut off at {length}"
        content, reasoning = (
            without_begun_citations(without_half_a_marker(text, case), case)
            for text in (part.content, part.reasoning)
        )
        assert without_begun_citations(whole.content, case).startswith(content), place
        thought = without_begun_citations(whole.reasoning, case)
        assert thought.startswith(reasoning) or has_draft(part, whole), place
        calls = zip(part.tool_calls, whole.tool_calls, strict=False)
        assert all(is_beginning(call, of=complete) for call, complete in calls), place


@for_each_file
def test_a_whole_reply_is_the_fold_of_its_stream(cases):
    for case in cases:
        assert folded(streamed(case)) == (
            case.content,
            case.reasoning,
            [arguments for _, arguments in case.tool_calls],
        ), case.case_id


@for_each_file
def test_neighbours_of_one_kind_are_one_delta(cases):
    for case in cases:
        for deltas, _ in golden.stream(case.spec, [case.text]):
            kinds = [(type(delta), getattr(delta, "index", 0)) for delta in deltas]
            assert all(first != second for first, second in pairwise(kinds)), case.case_id


@pytest.mark.parametrize("row", [*TOOL_FORMATS, *REASONING_FORMATS], ids=lambda row: row.name)
def test_every_format_has_golden_cases(row):
    if isinstance(row, ToolFormat):
        least = 10 if row.readings else 0
        found = [case for case in CASES if case.spec.format.tools is row]
    else:
        least = 0 if row.name in UNTESTED else 5
        found = [case for case in CASES if case.spec.format.reasoning is row]
    assert len(found) >= least


def cuts(cases):
    """Yield cases and where to cut them: here and there, and in every marker that is new."""
    known = set()
    for case in cases:
        text = case.text
        places = [range(1, len(text), len(text) // MAX_SPREAD_CUTS + 1)]
        for marker in MARKER.finditer(text):
            if marker[0] not in known:
                known.add(marker[0])
                places.append(range(marker.start() + 1, marker.end()))
        for position in sorted(set(chain(*places))):
            yield case, position


@cache
def streamed(case):
    """Return the deltas of a reply, fed character by character."""
    return list(golden.stream(case.spec, case.text, case.stop))


@cache
def stopped(case):
    """Return the completion of a reply as if nothing had cut it off."""
    return golden.play(case.spec, [case.text], FinishReason.STOP)


def folded(stream):
    """Return content, reasoning and arguments, without the code that folds elsewhere."""
    content, reasoning, arguments = "", "", {}
    for deltas, _ in stream:
        for delta in deltas:
            match delta:
                case ContentDelta(text):
                    content += text
                case ReasoningDelta(text):
                    reasoning += text
                case ToolCallDelta():
                    arguments[delta.index] = arguments.get(delta.index, "") + delta.arguments
    return content, reasoning, [arguments[index] for index in sorted(arguments)]


def without_half_a_marker(text, case):
    """Half a marker, or the text that leads to one, is text when the rest never comes."""
    if not text.strip():
        return ""
    family = case.spec.format
    names = (case.spec.tools or ()) if family.tools.name_lead else ()
    leads = (*family.tools.leads, *(f"{name}{family.tools.name_lead}" for name in names))
    cited = family.tools.citations
    tags = (cited.begin, cited.end) if cited else ()
    markers = [*family.markers, *leads, *tags]
    for start in range(max(0, len(text) - 40), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return text[:start].rstrip()
    return text


def without_begun_citations(text, case):
    """The beginning of a possible citation is left out, even where its end never comes."""
    cited = case.spec.format.tools.citations
    return text.replace(f"{cited.begin}>", "") if cited else text


def has_draft(part, whole):
    """Tell whether a thought was cut off after a call, which counts if the model stops there."""
    is_thought = not (part.content or part.tool_calls)
    return is_thought and bool(whole.tool_calls) and part.reasoning.startswith(whole.reasoning)


def is_beginning(call, *, of):
    """Tell whether a call is a whole one, or a part that nobody takes for one."""
    is_whole = call.arguments == of.arguments
    is_part = of.arguments.startswith(call.arguments) and not is_json_object(call.arguments)
    return call.name == of.name and (is_whole or is_part)


def is_json_object(text):
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
