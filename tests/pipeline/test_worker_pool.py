"""Lanes of work: bounded, fair between callers, and nothing done for nobody."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from backend.config import LIGHT_THREADS, LIGHT_WORK_BYTES
from backend.errors import OverloadedError
from backend.pipeline import worker_pool
from backend.pipeline.worker_pool import Lane
from common.rpc import AbandonedError, enter_call, require_caller

TIMEOUT_S = 30.0


class Gate:
    """Work that notes its name when it begins, and waits to be let through."""

    def __init__(self):
        self.began = []
        self.opened = threading.Event()
        self.entered = threading.Semaphore(0)

    def work(self, name):
        def run():
            self.began.append(name)
            self.entered.release()
            self.opened.wait()
            return name

        return run


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def gate(threads):  # noqa: ARG001 (opened before its threads are joined)
    made = Gate()
    yield made
    made.opened.set()


def submit(lane, gate, name, *, peer="a", size_bytes=1):
    async def call():
        enter_call(peer)
        return await lane.run(gate.work(name), size_bytes)

    return asyncio.create_task(call())


async def entered(gate, count=1):
    for _ in range(count):
        await asyncio.to_thread(gate.entered.acquire)


async def test_results_and_errors_reach_the_caller(threads):
    lane = Lane(threads, 1)
    assert await lane.run(lambda: 7, 1) == 7
    with pytest.raises(ZeroDivisionError):
        await lane.run(lambda: 1 // 0, 1)
    assert await lane.run(lambda: 8, 1) == 8


async def test_callers_take_turns(threads, gate):
    lane = Lane(threads, 1)
    names = ["a1", "a2", "a3", "b1", "b2", "c1"]
    tasks = [submit(lane, gate, name, peer=name[0]) for name in names]
    await entered(gate)
    gate.opened.set()
    assert await asyncio.gather(*tasks) == names
    assert gate.began == ["a1", "a2", "b1", "c1", "a3", "b2"]


async def test_work_of_callers_that_have_left_is_not_begun(threads, gate):
    lane = Lane(threads, 1)
    tasks = [submit(lane, gate, str(number)) for number in range(4)]
    await entered(gate)
    for task in tasks[1:3]:
        task.cancel()
    await asyncio.wait(tasks[1:3])
    gate.opened.set()
    assert await tasks[3] == "3"
    assert gate.began == ["0", "3"]


async def test_what_waits_is_bounded_in_number(threads, gate):
    lane = Lane(threads, 1, max_waiting=2)
    tasks = [submit(lane, gate, str(number)) for number in range(3)]
    await entered(gate)
    with pytest.raises(OverloadedError, match=r"2 calls .* wait to be prepared"):
        await submit(lane, gate, "3")
    tasks[2].cancel()
    await asyncio.wait(tasks[2:])
    tasks[2] = submit(lane, gate, "4")
    gate.opened.set()
    assert await asyncio.gather(*tasks) == ["0", "1", "4"]


async def test_what_waits_and_runs_is_bounded_in_bytes(threads, gate):
    lane = Lane(threads, 1, max_bytes=100)
    large = submit(lane, gate, "large", size_bytes=1000)
    await entered(gate)
    with pytest.raises(OverloadedError):
        await submit(lane, gate, "small")
    gate.opened.set()
    assert await large == "large"
    assert await submit(lane, gate, "small") == "small"


async def test_work_that_has_begun_learns_that_its_caller_has_left(threads):
    lane, began, goes_on, ended = Lane(threads, 1), asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    def work():
        loop.call_soon_threadsafe(began.set)
        goes_on.wait()
        with pytest.raises(AbandonedError):
            require_caller()
        ended.append(True)

    task = asyncio.create_task(lane.run(work, 1))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    goes_on.set()
    await lane.run(lambda: None, 1)
    assert ended


async def test_small_work_does_not_wait_for_large():
    gate = Gate()
    size_bytes = LIGHT_WORK_BYTES + 1
    large = [
        asyncio.create_task(worker_pool.run(gate.work(name), size_bytes=size_bytes))
        for name in range(8)
    ]
    try:
        await entered(gate)
        assert await worker_pool.run(lambda: "small", size_bytes=1) == "small"
        assert await worker_pool.run(lambda: "film", size_bytes=1, reads_media=True) == "film"
    finally:
        gate.opened.set()
        await asyncio.gather(*large)


async def test_work_of_many_parts_leaves_its_thread_to_others():
    count, begun, ended = 2 * LIGHT_THREADS, threading.Semaphore(0), threading.Event()

    def parts():
        begun.release()
        while not ended.is_set():
            yield 1

    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as endless:
        try:
            for _ in range(count):
                endless.create_task(worker_pool.run_in_turns(parts(), size_bytes=0))
            for _ in range(count):
                await asyncio.to_thread(begun.acquire, timeout=TIMEOUT_S)
            assert await worker_pool.run(lambda: "other", size_bytes=0) == "other"
        finally:
            ended.set()
