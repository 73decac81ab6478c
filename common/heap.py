"""Memory that large requests leave behind: the C library keeps it unless it is told not to."""

import asyncio
import ctypes

# Until then a call that has ended holds nothing any more.
TRIM_DELAY_S = 1.0


class Heap:
    """Gives freed memory back to the system, now and then; belongs to an event loop."""

    def __init__(self) -> None:
        """Start with nothing to do."""
        self._is_due = False

    def trim_soon(self) -> None:
        """Give back what has been freed by then, on a thread; once for all who ask meanwhile."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(TRIM_DELAY_S, self._begin)

    def _begin(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, trim)


def trim() -> bool:
    """Give freed memory back to the system where glibc keeps it; false elsewhere."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return malloc_trim is not None and bool(malloc_trim(0))
