"""Waits for the states of other processes and threads, which have no event to wait for."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

POLL_S = 0.01


async def until(condition: Callable[[], Any], *, timeout_s: float = 120.0) -> None:
    """Wait in a coroutine until a condition holds, for example in the engine's snapshots."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)


def wait_until(condition: Callable[[], Any], *, timeout_s: float = 120.0) -> Any:
    """Wait in a thread until a condition holds, and return its value."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it has not come about in time"
        time.sleep(POLL_S)
    return found
