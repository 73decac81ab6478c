"""Work on a thread that nobody has to wait for."""

import asyncio
import sys
import threading

import pytest

from common.process import in_own_thread


async def test_the_result_comes_back_from_another_thread():
    def work(number, *, added):
        return number + added, threading.current_thread().daemon

    assert await in_own_thread(work, 3, added=4) == (7, True)


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)])
async def test_what_is_raised_comes_back_too(error):
    def work():
        raise error

    with pytest.raises(type(error)) as caught:
        await in_own_thread(work)
    assert caught.value is error


async def test_whoever_leaves_does_not_wait_for_the_work():
    go_on, has_begun = threading.Event(), threading.Event()

    def work():
        has_begun.set()
        go_on.wait()

    task = asyncio.create_task(in_own_thread(work))
    await asyncio.to_thread(has_begun.wait)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    go_on.set()


async def test_another_thread_waits_until_it_runs():
    await in_own_thread(int)
    called = set()
    sys.setprofile(lambda frame, _event, _value: called.add(frame.f_code))
    try:
        await in_own_thread(int)
    finally:
        sys.setprofile(None)
    assert threading.Thread.__init__.__code__ in called
    assert threading.Thread.start.__code__ not in called


async def test_a_thread_that_cannot_start_is_an_error():
    await in_own_thread(int)
    before = threading.stack_size(2**45)
    try:
        with pytest.raises(RuntimeError, match="start new thread"):
            await asyncio.wait_for(in_own_thread(int), 10)
    finally:
        threading.stack_size(before)
