import json

import golden
import pytest

from backend.core.step import FinishReason
from backend.output.replay import (
    RecordingError,
    cut_evenly,
    cut_randomly,
    read_recording,
    report,
)

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TEXT = 'So.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def line(**fields):
    return json.dumps({"id": "r", "format": "hermes_json", "chunks": [TEXT], **fields})


def test_a_report_is_what_a_client_gets():
    recording = read_recording(line(reasoning_format="think", tools=[TOOL]))
    result = report(recording, recording.chunks)
    [call] = result["tool_calls"]
    assert (call["name"], call["arguments"]) == ("f", '{"a": 1}')
    assert result == {
        "id": "r",
        "content": "So.\n",
        "reasoning": "",
        "tool_calls": [call],
        "finish_reason": "tool_calls",
        "deltas": [
            {"content": "So.\n"},
            {"tool_call": {"index": 0, "id": call["id"], "name": "f", "arguments": '{"a": 1}'}},
        ],
    }


def test_a_thought_is_a_delta_of_its_own():
    fields = {"reasoning_format": "think", "prompt_tail": "<think>\n", "chunks": "R</think>So."}
    recording = read_recording(line(**fields))
    assert report(recording, ["R</th", "ink>So."])["deltas"] == [
        {"reasoning": "R"},
        {"content": "So."},
    ]


@pytest.mark.parametrize("tools", [None, []])
def test_without_tools_any_name_counts(tools):
    recording = read_recording(line(tools=tools))
    assert report(recording, recording.chunks)["finish_reason"] == "tool_calls"


def test_the_answer_of_a_grammar_is_content():
    recording = read_recording(line(tools=[TOOL], ruled=True))
    assert report(recording, recording.chunks)["content"] == TEXT
    with pytest.raises(RecordingError, match='"ruled" is neither true nor false'):
        read_recording(line(ruled="yes"))


def test_a_name_that_was_not_offered_is_content():
    recording = read_recording(line(tools=[{"name": "g"}]))
    assert report(recording, recording.chunks)["content"] == TEXT


def test_what_is_left_out_has_a_default():
    recording = read_recording('{"format": "none", "chunks": "So."}')
    assert recording.recording_id is None
    assert recording.stop is FinishReason.STOP
    assert recording.spec.format.name == "none+none"


def test_the_limit_leaves_a_call_open():
    recording = read_recording(line(chunks=TEXT[:-13], stop="length"))
    result = report(recording, recording.chunks)
    assert result["finish_reason"] == "length"
    assert result["tool_calls"][0]["arguments"] == '{"a": 1'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "no JSON"),
        (b"\xff", "no JSON"),
        pytest.param("[" * 100_000, "no JSON", id="deep"),
        ("[]", "not a JSON object"),
        ('{"chunks": []}', '"format" is missing'),
        ('{"format": 1, "chunks": []}', '"format" is not text'),
        (line(format="klingon"), "'klingon', which is unknown; known are .*hermes_json"),
        (line(reasoning_format="klingon"), "known are .*mistral_think"),
        (line(stop="eos"), "'eos', not one of stop, length"),
        (line(chunks=None), '"chunks" is neither'),
        (line(chunks=["a", 1]), '"chunks" is neither'),
        (line(tools={}), '"tools" is not an array'),
        (line(tools=[{}]), "a tool without a name"),
        (line(tools=["f"]), "a tool without a name"),
    ],
)
def test_what_is_wrong_with_a_line_is_told(text, complaint):
    with pytest.raises(RecordingError, match=complaint):
        read_recording(text)


def test_a_cut_loses_nothing():
    assert cut_evenly("abcde", 2) == ["ab", "cd", "e"]
    text = "abcdefgh" * 50
    pieces = cut_randomly(text, "7")
    assert "".join(pieces) == text
    assert len(set(map(len, pieces))) > 1
    assert cut_randomly(text, "7") == pieces != cut_randomly(text, "8")


@pytest.mark.parametrize("case", [*golden.cases("hermes_json")], ids=str)
def test_a_golden_line_can_be_replayed(case):
    pieces = cut_randomly(case.text, "1")
    assert golden.named_calls(golden.play(case.spec, pieces, case.stop)) == case.tool_calls


def test_a_report_tells_of_each_call_what_was_repaired_and_what_was_not_finished():
    def states(text):
        recording = read_recording(line(chunks=[text]))
        calls = report(recording, recording.chunks)["tool_calls"]
        return [(call.get("repairs"), call.get("unfinished")) for call in calls]

    whole = '<tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>'
    assert states(whole) == [(None, None)]
    assert states(whole.replace('"a"', "a")) == [(["a key without quotes"], None)]
    for damaged, reason in {
        '{"a": "say "b" and go"}': "a quote inside a string",
        '{"a": b}': "a string without quotes",
        "{'a': 'it\\'s'}": "strings in '",
    }.items():
        assert states(whole.replace('{"a": "b"}', damaged)) == [([reason], None)]
    assert states(whole + whole[:-16]) == [(None, None), (None, True)]
