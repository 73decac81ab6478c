"""Returns memory of large requests to the system; the C library keeps it unless told otherwise."""

import asyncio
import ctypes

# By then an ended call holds no memory.
TRIM_DELAY_S = 1.0
# glibc creates up to eight per core, and free memory of one heap serves no thread of another.
HEAPS = 2
_M_ARENA_MAX = -8


class Heap:
    """Returns freed memory to the system from time to time; belongs to an event loop."""

    def __init__(self) -> None:
        self._is_due = False

    def trim_soon(self) -> None:
        """Schedule a trim on a thread; calls before it runs share it."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(TRIM_DELAY_S, self._begin)

    def _begin(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, trim)


def trim() -> bool:
    """Return freed memory to the system, where glibc keeps it; false elsewhere."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return malloc_trim is not None and bool(malloc_trim(0))


def share_heaps() -> bool:
    """Have all threads of this process share two heaps where it is glibc's; false elsewhere.

    Call it before there are threads.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_ARENA_MAX, HEAPS))
