"""Hands open calls over to a new engine process: the suspects of the last loss one by one.

So when a process ends again, only one call has made no progress since.
"""

from collections import deque
from collections.abc import Callable

from backend.engine.supervision.ledger import Ledger, OpenCall


class Handover:
    """The calls that a process has yet to get; normally none."""

    def __init__(self, ledger: Ledger, give: Callable[[OpenCall], None]) -> None:
        """Start without a process: calls wait until `begin`.

        Args:
            ledger: Knows the open calls.
            give: Sends a call to the process.
        """
        self._ledger = ledger
        self._give = give
        self._suspects: deque[OpenCall] = deque()
        self._tried: OpenCall | None = None
        self._is_open = False
        self._is_done = False

    @property
    def is_done(self) -> bool:
        """Whether the process has all open calls: a new call may be sent at once."""
        return self._is_done

    def pause(self) -> None:
        """Hold calls back, because the process is gone."""
        self._is_open = self._is_done = False

    def begin(self) -> None:
        """Give a new process the open calls: first the suspects, then all others."""
        self._is_open, self._is_done = True, False
        self._suspects = deque(call for call in self._ledger.calls() if call.losses)
        self._tried = None
        self.advance()

    def advance(self) -> None:
        """Continue when the last suspect has made progress, or has left."""
        if not self._is_open or self._is_done:
            return
        while not self._is_waiting():
            if not self._suspects:
                self._tried, self._is_done = None, True
                self._give_rest()
                return
            self._tried = self._suspects.popleft()
            if self._tried.is_open:
                self._give(self._tried)

    def _is_waiting(self) -> bool:
        """Whether the last suspect has yet to prove harmless."""
        return self._tried is not None and self._tried.is_open and self._tried.losses > 0

    def _give_rest(self) -> None:
        for call in list(self._ledger.calls()):
            if not call.is_sent:
                self._give(call)
