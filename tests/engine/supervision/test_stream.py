"""The events of a request reach its reader once and in order, however the two take turns."""

import asyncio

import pytest
from engine_driver import make_request

from backend.core.step import FinishReason, PrefillDone, StepLogprobs, Steps
from backend.engine.messages.protocol import Failure, Told
from backend.engine.supervision.open_calls import OpenCalls, OpenRequest
from backend.errors import GenerationFailedError


def opened() -> OpenRequest:
    return OpenRequest(make_request("a", [1]))


async def test_steps_between_two_looks_come_together():
    request = opened()
    done, logprobs = PrefillDone(3, 1.5), [StepLogprobs(-0.5), StepLogprobs(-1.5)]
    request.note(Steps(done, [1], logprobs[:1]))
    request.note(Steps(None, [2], logprobs[1:], FinishReason.LENGTH, drafted=3, accepted=2))
    assert await anext(request) == Steps(
        done, [1, 2], logprobs, FinishReason.LENGTH, drafted=3, accepted=2
    )
    assert request.generated == [1, 2]


async def test_the_stream_ends_after_the_finish():
    request = opened()
    request.note(Steps(None, [1], [], FinishReason.STOP))
    assert request.has_ended
    assert len([steps async for steps in request]) == 1


async def test_a_waiting_consumer_is_woken():
    request = opened()
    waiting = asyncio.create_task(anext(request))
    await asyncio.sleep(0)
    request.note(Steps(token_ids=[7]))
    assert (await waiting).token_ids == [7]


async def test_a_consumer_that_was_cancelled_may_look_again():
    request = opened()
    waiting = asyncio.create_task(anext(request))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    request.note(Steps(token_ids=[7]))
    assert (await anext(request)).token_ids == [7]


async def test_a_failure_comes_after_the_steps_before_it():
    calls = OpenCalls()
    request = calls.submit(make_request("a", [1]))
    failure = Failure.of(GenerationFailedError("broken"))
    calls.note(Told({"a": Steps(token_ids=[1]), "unknown": Steps()}, {"a": failure, "b": failure}))
    assert (await anext(request)).token_ids == [1]
    with pytest.raises(GenerationFailedError, match="broken"):
        await anext(request)


async def test_the_prefill_of_another_process_is_no_news():
    request = opened()
    for cached_tokens in (1, 2):
        request.note(Steps(PrefillDone(cached_tokens, 1.0), [5]))
        steps = await anext(request)
        assert (steps.prefill is None) == (cached_tokens == 2)
