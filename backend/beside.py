"""Threads beside the event loop, for what takes a while."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import TypeVar

from backend.config import MEDIA_THREADS

Result = TypeVar("Result")

_media_threads = ThreadPoolExecutor(MEDIA_THREADS, thread_name_prefix="media")
_over: ContextVar[threading.Event | None] = ContextVar("over", default=None)


class AbandonedError(Exception):
    """Nobody waits for this work any more; nobody sees this either."""


async def run_beside(work: Callable[[], Result], *, reads_media: bool) -> Result:
    """Return what the work returns, done on a thread; work that has not begun can be cancelled.

    Work that reads media and has begun ends at its next `require_wanted`.

    Args:
        work: Does not touch the event loop.
        reads_media: It takes one of a few threads, so that nobody's text waits behind pictures.
    """
    if not reads_media:
        return await asyncio.to_thread(work)
    loop, context, over = asyncio.get_running_loop(), copy_context(), threading.Event()
    context.run(_over.set, over)
    try:
        return await loop.run_in_executor(_media_threads, context.run, work)
    finally:
        over.set()


def require_wanted() -> None:
    """Go on with work beside the event loop only while somebody waits for it.

    Raises:
        AbandonedError: Whoever asked for it has gone.
    """
    over = _over.get()
    if over is not None and over.is_set():
        raise AbandonedError
