import asyncio
import os
import sys
from pathlib import Path

import pytest

from common import machine_memory
from common.machine_memory import Heap, trim

STATM = Path("/proc/self/statm")


def resident_bytes():
    return int(STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not STATM.exists(), reason="the system does not tell")
def test_what_was_freed_goes_back_to_the_system():
    # Too small to be mapped one by one; the last block keeps the heap from shrinking.
    blocks = [bytearray(os.urandom(1)) * 100_000 for _ in range(3000)]
    last = bytearray(100_000)
    full = resident_bytes()
    blocks.clear()
    assert trim()
    assert full - resident_bytes() > 200_000_000
    assert len(last) == 100_000


def test_a_system_without_that_call_is_left_alone(monkeypatch):
    monkeypatch.setattr(machine_memory.ctypes, "CDLL", lambda _name: sys)
    assert not trim()


async def test_all_who_ask_meanwhile_are_served_at_once(monkeypatch):
    trimmed = asyncio.Event()
    loop, calls = asyncio.get_running_loop(), []

    def note():
        calls.append(1)
        loop.call_soon_threadsafe(trimmed.set)

    monkeypatch.setattr(machine_memory, "TRIM_DELAY_S", 0.01)
    monkeypatch.setattr(machine_memory, "trim", note)
    ours = Heap()
    for count in (1, 2):
        for _ in range(5):
            ours.trim_soon()
        await asyncio.wait_for(trimmed.wait(), 30)
        trimmed.clear()
        assert len(calls) == count
