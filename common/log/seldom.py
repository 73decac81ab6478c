"""Limits how often a frequent event is told."""

import time


class Seldom:
    """Lets one event per interval through; belongs to one thread."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._due_at = float("-inf")

    def is_due(self) -> bool:
        """Tell whether to let this event through."""
        now = time.monotonic()
        if now < self._due_at:
            return False
        self._due_at = now + self._interval_s
        return True
