import pytest
from engine_events import steps_of
from golden import ChunkDetokenizer, named_calls, named_format, play, stream

from backend.core.step import (
    AlternativeLogprob,
    ContentDelta,
    FinishReason,
    ReasoningDelta,
    StepLogprobs,
    TokenLogprob,
    TokenStep,
    ToolCallDelta,
)
from backend.output.reply import ByteDetokenizer, ReplyCursor, ReplySpec

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def make_spec(**parts):
    return ReplySpec(format=named_format("hermes", "think"), tools={"f": {}}, **parts)


def make_cursor(chunks, **parts):
    spec = make_spec(**parts)
    return ReplyCursor(spec, ChunkDetokenizer(chunks), lambda token_id: chunks[token_id].encode())


def step(token_id, reason=None):
    return TokenStep(token_id, reason, StepLogprobs(-0.5, ((token_id, -0.5), (0, -1.5))))


def test_the_stop_token_has_no_text_and_is_not_counted():
    cursor = make_cursor(["Hi", "<|im_end|>"], wants_logprobs=True)
    assert cursor.advance(steps_of(step(0))) == ((ContentDelta("Hi"),), None)
    deltas, finish = cursor.advance(steps_of(step(1, FinishReason.STOP)))
    assert deltas == ()
    assert finish.reason is FinishReason.STOP
    assert cursor.completion_tokens == len(finish.logprobs) == 1


def test_the_token_at_the_limit_has_text_and_is_counted():
    cursor = make_cursor(["Hi", " you"])
    deltas, finish = cursor.advance(steps_of(step(0), step(1, FinishReason.LENGTH)))
    assert deltas == (ContentDelta("Hi you"),)
    assert finish.reason is FinishReason.LENGTH
    assert cursor.completion_tokens == 2


@pytest.mark.parametrize(
    ("end", "reason"), [("\n<tool_ca", FinishReason.LENGTH), ("", FinishReason.TOOL_CALLS)]
)
def test_a_limit_inside_the_opener_of_another_call_is_the_reason(end, reason):
    found = play(make_spec(), [f"{CALL}{end}"], FinishReason.LENGTH)
    assert (found.content, len(found.tool_calls), found.finish.reason) == ("", 1, reason)


def test_the_token_that_completes_a_stop_string_is_not_counted():
    cursor = make_cursor(["a S", "TO", "P b", "c"], stop_strings=("STOP",), wants_logprobs=True)
    assert cursor.advance(steps_of(step(0))) == ((ContentDelta("a "),), None)
    assert cursor.advance(steps_of(step(1))) == ((), None)
    deltas, finish = cursor.advance(steps_of(step(2), step(3)))
    assert deltas == ()
    assert finish.reason is FinishReason.STOP
    assert cursor.completion_tokens == len(finish.logprobs) == 2


def test_a_stop_string_in_the_last_token_before_the_limit_is_a_stop():
    cursor = make_cursor(["END"], stop_strings=("END",))
    assert cursor.advance(steps_of(step(0, FinishReason.LENGTH)))[1].reason is FinishReason.STOP
    assert cursor.completion_tokens == 0


def test_nothing_comes_after_the_finish():
    cursor = make_cursor(["a", "b"])
    assert cursor.advance(steps_of(step(0, FinishReason.LENGTH)))[1] is not None
    assert cursor.advance(steps_of(step(1))) == ((), None)
    assert cursor.completion_tokens == 1


def test_every_counted_token_has_its_own_logprob_however_text_comes():
    chunks = ["<th", "ink>", "", "hm</think>a<", "b", "end"]
    cursor = make_cursor(chunks, wants_logprobs=True)
    *_, (_, finish) = [
        cursor.advance(steps_of(step(token_id, FinishReason.STOP if token_id == 5 else None)))
        for token_id in range(6)
    ]
    assert [token.token_id for token in finish.logprobs] == [0, 1, 2, 3, 4]
    first = AlternativeLogprob(0, b"<th", -1.5)
    assert finish.logprobs[1] == TokenLogprob(
        1, b"ink>", -0.5, (AlternativeLogprob(1, b"ink>", -0.5), first)
    )


def test_logprobs_are_left_out_when_nobody_asked():
    assert make_cursor(["a"]).advance(steps_of(step(0, FinishReason.LENGTH)))[1].logprobs == ()


def test_several_steps_at_once_give_joined_deltas():
    chunks = ["<think>", "h", "m", "</think>", "H", "i", *CALL, "e"]
    cursor = make_cursor(chunks)
    last = len(chunks) - 1
    deltas, finish = cursor.advance(
        steps_of(*(step(i) for i in range(last)), step(last, FinishReason.STOP))
    )
    *texts, call = deltas
    assert texts == [ReasoningDelta("hm"), ContentDelta("Hi")]
    assert (call.index, call.name, call.arguments) == (0, "f", '{"a": 1}')
    assert finish.reason is FinishReason.TOOL_CALLS


def test_of_joined_pieces_of_a_call_the_last_id_holds():
    chunks = ['[TOOL_CALLS][{"name": "f", "arguments": {"a": "b', '"}, "id": "aB3dE5fG7"}]']
    spec = ReplySpec(format=named_format("mistral", "none"), tools={"f": {}})
    (together,) = [delta for deltas, _ in stream(spec, ["".join(chunks)]) for delta in deltas]
    first, last = [delta for deltas, _ in stream(spec, chunks) for delta in deltas]
    assert together.call_id == last.call_id == "aB3dE5fG7"
    assert first.call_id not in ("", last.call_id)


def test_the_finishing_increment_comes_even_when_its_text_was_swallowed():
    *_, (deltas, finish) = stream(make_spec(), ["Hi.", CALL[:-1], ">"])
    assert deltas == ()
    assert finish.reason is FinishReason.TOOL_CALLS


def test_an_empty_reply_ends_with_a_stop():
    completion = play(make_spec(), [])
    assert (completion.content, completion.finish.reason) == ("", FinishReason.STOP)


def test_stop_strings_count_in_content_only():
    thought_and_call = "<think>STOP</think>" + CALL.replace("1", '"STOP"')
    completion = play(make_spec(stop_strings=("STOP", "name")), thought_and_call + " Hi. STOP !")
    assert (completion.content, completion.reasoning) == (" Hi. ", "STOP")
    assert named_calls(completion) == (("f", '{"a": "STOP"}'),)


def test_what_may_become_a_stop_string_goes_out_before_the_next_channel():
    spec = make_spec(stop_strings=("STOP",))
    streamed = [delta for deltas, _ in stream(spec, ["a ST", CALL, "OP"]) for delta in deltas]
    kinds = [type(delta) for delta in streamed]
    assert kinds == [ContentDelta, ContentDelta, ToolCallDelta, ContentDelta]
    assert [streamed[index].text for index in (0, 1, 3)] == ["a ", "ST", "OP"]


def test_a_call_after_a_stop_string_does_not_count():
    completion = play(make_spec(stop_strings=("STOP",)), ["Hi. STOP" + CALL])
    assert (completion.content, completion.tool_calls) == ("Hi. ", ())
    assert completion.finish.reason is FinishReason.STOP


def test_a_stop_string_across_multibyte_tokens():
    pieces = [b"a", "🛑!".encode()[:2], "🛑!".encode()[2:], b"b"]
    spec = make_spec(stop_strings=("🛑!",))
    detokenizer = ByteDetokenizer(pieces, trims_leading_space=False)
    cursor = ReplyCursor(spec, detokenizer, pieces.__getitem__)
    assert cursor.advance(steps_of(step(0), step(1))) == ((ContentDelta("a"),), None)
    deltas, finish = cursor.advance(steps_of(step(2), step(3)))
    assert (deltas, finish.reason) == ((), FinishReason.STOP)


def test_special_tokens_never_show_but_markers_do():
    pieces = [b"", b"<tool_call>", b'{"name": "f"}', b"</tool_call>", b"Hi"]
    detokenizer = ByteDetokenizer(pieces, trims_leading_space=False)
    cursor = ReplyCursor(make_spec(), detokenizer, pieces.__getitem__)
    deltas, _ = cursor.advance(steps_of(*(step(token_id) for token_id in (0, 4, 0, 1, 2, 3, 0))))
    assert deltas[0] == ContentDelta("Hi")
    assert isinstance(deltas[1], ToolCallDelta)
    assert len(deltas) == 2


@pytest.mark.parametrize(
    ("text", "stop", "reason"),
    [
        ("Hi", FinishReason.STOP, FinishReason.STOP),
        ("Hi", FinishReason.LENGTH, FinishReason.LENGTH),
        ("Hi", FinishReason.CANCELLED, FinishReason.CANCELLED),
        (CALL, FinishReason.STOP, FinishReason.TOOL_CALLS),
        (CALL, FinishReason.LENGTH, FinishReason.TOOL_CALLS),
        (CALL, FinishReason.CANCELLED, FinishReason.CANCELLED),
        (CALL[:-14], FinishReason.LENGTH, FinishReason.LENGTH),
        (CALL + CALL[:-20], FinishReason.LENGTH, FinishReason.LENGTH),
        (CALL + CALL[:-20], FinishReason.STOP, FinishReason.TOOL_CALLS),
        (CALL.replace("1", '1, "b": ') + CALL, FinishReason.STOP, FinishReason.STOP),
    ],
)
def test_the_finish_reason(text, stop, reason):
    assert play(make_spec(), [text], stop).finish.reason is reason


def test_a_call_that_was_not_completed_never_has_valid_arguments():
    damaged = CALL.replace("1", '"b"?"c": "d"').replace('"}', '"')
    completion = play(make_spec(), [CALL + damaged + CALL])
    arguments = [call.arguments for call in completion.tool_calls]
    assert arguments == ['{"a": 1}', '{"a": "b', '{"a": 1}']
    assert completion.finish.reason is FinishReason.STOP


def test_replies_do_not_mix():
    streams = [stream(make_spec(), "<think>hm</think>a" + CALL) for _ in range(2)]
    outputs = [[], []]
    for pair in zip(*streams, strict=True):
        for output, (deltas, _) in zip(outputs, pair, strict=True):
            output += [type(delta) for delta in deltas]
    assert outputs[0] == outputs[1]


def test_equal_calls_have_different_ids():
    calls = play(make_spec(), [CALL + CALL + CALL]).tool_calls
    assert named_calls(play(make_spec(), [CALL] * 3)) == (("f", '{"a": 1}'),) * 3
    assert len({call.call_id for call in calls}) == 3
