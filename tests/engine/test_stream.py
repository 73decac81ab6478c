import asyncio

import pytest

from backend.core.delta import FinishReason
from backend.core.step import TokenStep
from backend.engine.messages.stream import TokenStream
from backend.errors import GenerationFailedError


async def test_events_published_between_two_looks_come_together():
    stream = TokenStream()
    for token in (1, 2, 3):
        stream.deliver(TokenStep(token))
    assert [e.token_id for e in await anext(stream)] == [1, 2, 3]


async def test_the_stream_ends_after_the_finish():
    stream = TokenStream()
    stream.deliver(TokenStep(1, FinishReason.STOP))
    assert stream.has_ended
    assert len([events async for events in stream]) == 1


async def test_a_waiting_consumer_is_woken():
    stream = TokenStream()
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    stream.deliver(TokenStep(7))
    assert (await waiting)[0].token_id == 7


async def test_a_failure_comes_after_the_events_before_it():
    stream = TokenStream()
    stream.deliver(TokenStep(1))
    stream.deliver(GenerationFailedError("broken"))
    assert len(await anext(stream)) == 1
    with pytest.raises(GenerationFailedError, match="broken"):
        await anext(stream)
