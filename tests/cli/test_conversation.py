import json

import pytest

from backend.cli.chat import made_up_weather, read_toolbox
from backend.cli.render import model_options, reply_message, tool_message
from backend.core.step import ContentDelta, Increment, ReasoningDelta, ToolCallDelta, Usage
from backend.output.collect import CollectedCall, Collector

CALL = CollectedCall(0, "a", "f", '{"x": 1}')


def message_of(*deltas):
    collector = Collector()
    for count, delta in enumerate(deltas, start=1):
        collector.add(Increment((delta,), Usage(completion_tokens=count)))
    return reply_message(collector.completion)


def test_a_turn_goes_back_with_its_thought_and_its_calls():
    message = message_of(ReasoningDelta("hm"), ToolCallDelta(0, "a", "f", '{"x": 1}'))
    assert (message.role, message.reasoning_content) == ("assistant", "hm")
    assert json.loads(message.tool_calls) == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    ]


def test_a_turn_without_calls_has_none():
    assert message_of(ContentDelta("Hi")).tool_calls == ""


def test_a_result_names_its_call():
    message = tool_message(CALL, "3")
    assert (message.role, message.tool_call_id, message.name) == ("tool", "a", "f")


def test_a_model_that_is_a_path_is_sent_as_one(tmp_path):
    assert model_options(str(tmp_path)).ModelFile == str(tmp_path)
    assert model_options("org/name").ModelFile == ""


def test_the_weather_is_made_up_but_lasting():
    report = made_up_weather(CALL)
    assert set(json.loads(report)) == {"temperature", "condition"}
    assert made_up_weather(CALL) == report


@pytest.mark.parametrize("text", ['{"type": "function"}', "no JSON"])
def test_a_file_without_a_list_of_tools_is_refused(console, tmp_path, text):
    path = tmp_path / "tools.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"tools\.json"):
        read_toolbox(console, path)
