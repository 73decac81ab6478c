"""The messages of replies and of tokens."""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import assert_never

from backend.core.step import (
    ContentDelta,
    Delta,
    Finish,
    Increment,
    ReasoningDelta,
    ToolCallDelta,
    Usage,
)
from backend.output.collect import Completion, to_json
from backend.pb import backend_pb2 as pb
from backend.pipeline import worker_pool

# A third of a millisecond.
IDS_PER_PIECE = 2**12


def increment_reply(increment: Increment) -> pb.Reply:
    """Return the reply for one increment; its deltas are empty when it carries no text."""
    deltas = list(map(_chat_delta, increment.deltas))
    return _reply(deltas, increment.usage, increment.finish)


async def token_response(token_ids: Sequence[int]) -> bytes:
    """Return the serialised answer with all ids; many are written on a thread."""
    pieces = _token_pieces(token_ids)
    if len(token_ids) <= IDS_PER_PIECE:
        return b"".join(pieces)
    return b"".join(await worker_pool.run_in_turns(pieces, size_bytes=len(token_ids)))


def _token_pieces(token_ids: Sequence[int]) -> Iterator[bytes]:
    """Yield messages that are, one after the other, one with the values of all."""
    yield pb.TokenizationResponse(length=len(token_ids)).SerializeToString()
    for start in range(0, len(token_ids), IDS_PER_PIECE):
        piece = pb.TokenizationResponse(tokens=token_ids[start : start + IDS_PER_PIECE])
        yield piece.SerializeToString()


def completion_reply(completion: Completion) -> pb.Reply:
    """Return the reply for a whole completion: one delta per channel, the calls together."""
    calls = [
        pb.ToolCallDelta(
            index=call.index, id=call.call_id, name=call.name, arguments=call.arguments
        )
        for call in completion.tool_calls
    ]
    deltas = (
        pb.ChatDelta(reasoning_content=completion.reasoning),
        pb.ChatDelta(content=completion.content),
        pb.ChatDelta(tool_calls=calls),
    )
    return _reply(deltas, completion.usage, completion.finish)


def _reply(deltas: Sequence[pb.ChatDelta], usage: Usage, finish: Finish | None) -> pb.Reply:
    return pb.Reply(
        message="".join(map(_content, deltas)).encode(),
        chat_deltas=[delta for delta in deltas if delta.ByteSize()],
        tokens=usage.completion_tokens,
        prompt_tokens=usage.prompt_tokens,
        timing_prompt_processing=usage.prefill_ms,
        timing_token_generation=usage.decode_ms,
        logprobs=to_json(finish.logprobs) if finish and finish.logprobs else b"",
    )


_content = attrgetter("content")


def _chat_delta(delta: Delta) -> pb.ChatDelta:
    match delta:
        case ContentDelta(text):
            return pb.ChatDelta(content=text)
        case ReasoningDelta(text):
            return pb.ChatDelta(reasoning_content=text)
        case ToolCallDelta(index, call_id, name, arguments):
            call = pb.ToolCallDelta(index=index, id=call_id, name=name, arguments=arguments)
            return pb.ChatDelta(tool_calls=[call])
        case _:
            assert_never(delta)
