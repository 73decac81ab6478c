from backend.core.step import (
    ContentDelta,
    Finish,
    FinishReason,
    Increment,
    ReasoningDelta,
    ToolCallDelta,
    Usage,
)
from backend.output.collect import CollectedCall, Collector


def test_a_stream_without_anything_is_an_empty_reply_that_stopped():
    completion = Collector().completion
    assert (completion.content, completion.reasoning, completion.tool_calls) == ("", "", ())
    assert completion.finish == Finish(FinishReason.STOP)


def test_the_fold_keeps_text_calls_usage_and_finish():
    collector = Collector()
    usage = Usage(prompt_tokens=7, completion_tokens=4)
    finish = Finish(FinishReason.LENGTH)
    collector.add(Increment((ReasoningDelta("h"), ReasoningDelta("m")), Usage(prompt_tokens=7)))
    collector.add(Increment((ContentDelta("a"), ToolCallDelta(1, "id1", "g", "{}")), usage))
    collector.add(Increment((ToolCallDelta(0, "id0", "f"),), usage))
    collector.add(Increment((ToolCallDelta(0, arguments="{}"), ContentDelta("b")), usage, finish))
    completion = collector.completion
    assert (completion.content, completion.reasoning) == ("ab", "hm")
    assert completion.tool_calls == (
        CollectedCall(0, "id0", "f", "{}"),
        CollectedCall(1, "id1", "g", "{}"),
    )
    assert (completion.usage, completion.finish) == (usage, finish)
