import json
import threading
from array import array

import pytest

from backend.core.scoring import Embedding
from backend.core.step import (
    ContentDelta,
    Finish,
    FinishReason,
    Increment,
    ReasoningDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from backend.output.collect import Collector
from backend.pb import backend_pb2 as pb
from backend.rpc.parsing.scoring_fields import embedding_result
from backend.rpc.replies import (
    IDS_PER_PIECE,
    completion_reply,
    increment_reply,
    token_response,
)

IDS = list(range(8 * IDS_PER_PIECE + 1))
USAGE = Usage(prompt_tokens=5, cached_tokens=2, completion_tokens=3, prefill_ms=1.5, decode_ms=2.5)
STOP = Finish(FinishReason.STOP)
CALL = ToolCallDelta(0, "c0", "get_weather", '{"city": ')


def increment(*deltas, finish=None):
    return Increment(deltas, USAGE, finish)


def whole(*increments):
    collector = Collector()
    for each in increments:
        collector.add(each)
    return completion_reply(collector.completion)


def test_counts_and_times_stand_in_every_reply():
    for reply in (increment_reply(increment()), whole(increment(finish=STOP))):
        assert (reply.tokens, reply.prompt_tokens) == (3, 5)
        assert (reply.timing_prompt_processing, reply.timing_token_generation) == (1.5, 2.5)


def test_the_message_is_the_visible_text_alone():
    reply = increment_reply(
        increment(ReasoningDelta("hm"), ContentDelta("Let me "), CALL, ContentDelta("see"))
    )
    assert reply.message == b"Let me see"
    assert list(reply.chat_deltas) == [
        pb.ChatDelta(reasoning_content="hm"),
        pb.ChatDelta(content="Let me "),
        pb.ChatDelta(
            tool_calls=[
                pb.ToolCallDelta(index=0, id="c0", name="get_weather", arguments='{"city": ')
            ]
        ),
        pb.ChatDelta(content="see"),
    ]


def test_an_increment_of_nothing_carries_no_delta():
    assert not increment_reply(increment(ContentDelta(""))).chat_deltas
    assert not increment_reply(increment()).chat_deltas


def test_a_whole_reply_has_a_delta_per_channel():
    reply = whole(
        increment(ReasoningDelta("h"), ReasoningDelta("m")),
        increment(ContentDelta("a"), CALL),
        increment(ToolCallDelta(0, arguments='"Oslo"}'), ToolCallDelta(1, "c1", "now")),
        increment(ContentDelta("b"), finish=Finish(FinishReason.TOOL_CALLS)),
    )
    first = pb.ToolCallDelta(index=0, id="c0", name="get_weather", arguments='{"city": "Oslo"}')
    second = pb.ToolCallDelta(index=1, id="c1", name="now")
    assert list(reply.chat_deltas) == [
        pb.ChatDelta(reasoning_content="hm"),
        pb.ChatDelta(content="ab"),
        pb.ChatDelta(tool_calls=[first, second]),
    ]
    assert reply.message == b"ab"


def test_logprobs_are_sent_once_at_the_end():
    logprobs = (TokenLogprob(97, b"a", -0.5),)
    finish = Finish(FinishReason.STOP, logprobs)
    assert increment_reply(increment(ContentDelta("a"))).logprobs == b""
    for reply in (increment_reply(increment(finish=finish)), whole(increment(finish=finish))):
        (entry,) = json.loads(reply.logprobs)["content"]
        assert (entry["id"], entry["bytes"]) == (97, [97])


def test_without_logprobs_there_is_no_json():
    assert increment_reply(increment(finish=STOP)).logprobs == b""


class NotingList(list):
    """Notes the threads that take parts of it."""

    def __init__(self, values):
        super().__init__(values)
        self.threads = set()

    def __getitem__(self, place):
        self.threads.add(threading.current_thread())
        return super().__getitem__(place)


async def test_many_ids_are_not_written_on_the_event_loop():
    ids = NotingList(IDS)
    reply = pb.TokenizationResponse.FromString(await token_response(ids))
    assert (list(reply.tokens), reply.length) == (IDS, len(IDS))
    assert threading.main_thread() not in ids.threads
    few = pb.TokenizationResponse.FromString(await token_response(IDS[:5]))
    assert (list(few.tokens), few.length) == (IDS[:5], 5)


@pytest.mark.parametrize(("dim", "vectors"), [(3, 1), (31, 1), (32, 1), (33, 1), (128, 130)])
def test_an_embedding_is_answered_float_by_float_whatever_its_size(dim, vectors):
    floats = array("f", [number / 7 - 3 for number in range(dim * vectors)])
    result = embedding_result(
        Embedding(data=floats.tobytes(), dim=dim, is_pooled=vectors == 1, prompt_tokens=5)
    )
    assert array("f", result.embeddings) == floats
    assert (result.tokens, result.dim, result.prompt_tokens) == (vectors, dim, 5)
    assert result.layout == (
        pb.EMBEDDING_LAYOUT_FINAL if vectors == 1 else pb.EMBEDDING_LAYOUT_PER_TOKEN
    )
