"""Threads beside the event loop, for what takes a while."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from backend.config import MEDIA_THREADS

Result = TypeVar("Result")

_media_threads = ThreadPoolExecutor(MEDIA_THREADS, thread_name_prefix="media")


async def run_beside(work: Callable[[], Result], *, reads_media: bool) -> Result:
    """Return what the work returns, done on a thread; work that has not begun can be cancelled.

    Args:
        work: Does not touch the event loop.
        reads_media: It takes one of a few threads, so that nobody's text waits behind pictures.
    """
    if not reads_media:
        return await asyncio.to_thread(work)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_media_threads, copy_context().run, work)
