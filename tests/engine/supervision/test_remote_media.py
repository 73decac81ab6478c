"""Media are prepared in the engine's process for as long as their caller waits."""

import asyncio
import threading

import numpy as np
import pytest

from backend.core.prompt import MediaKind
from backend.engine.messages.protocol import MediaFacts
from backend.engine.supervision.text_part import RemoteMedia
from common.rpc import AbandonedError, enter_work


async def test_a_preparation_ends_when_its_caller_leaves():
    begun, ended, abandoned = asyncio.Event(), asyncio.Event(), threading.Event()

    async def prepare(_request):
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    facts = MediaFacts(snippets={}, takes_parts=False, sampling_rate=16000)
    media = RemoteMedia(facts, prepare, asyncio.get_running_loop())

    def work():
        enter_work(abandoned)
        return media.prepare(MediaKind.AUDIO, np.zeros(4, np.float32), b"")

    waiting = asyncio.ensure_future(asyncio.to_thread(work))
    await begun.wait()
    abandoned.set()
    with pytest.raises(AbandonedError):
        await waiting
    await ended.wait()
