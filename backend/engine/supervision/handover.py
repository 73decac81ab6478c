"""Hands open calls over to an engine process: one by one those that the last one may have died of.

So a call that ends a process for the second time is alone in having got no further since.
"""

from collections import deque
from collections.abc import Callable

from backend.engine.supervision.ledger import Ledger, OpenCall


class Handover:
    """What a process has yet to be given; nothing in ordinary times."""

    def __init__(self, ledger: Ledger, give: Callable[[OpenCall], None]) -> None:
        """Begin without a process: calls wait until `begin`.

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
        """Whether the process has all that is open: a new call may be given at once."""
        return self._is_done

    def pause(self) -> None:
        """Hold calls back: the process has gone."""
        self._is_open = self._is_done = False

    def begin(self) -> None:
        """Give a new process what is open: first the suspects, then all others."""
        self._is_open, self._is_done = True, False
        self._suspects = deque(call for call in self._ledger.calls() if call.losses)
        self._tried = None
        self.advance()

    def advance(self) -> None:
        """Go on when the last suspect has got further, or has left."""
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
        """Whether the suspect that was given last has yet to show that it harms nobody."""
        return self._tried is not None and self._tried.is_open and self._tried.losses > 0

    def _give_rest(self) -> None:
        for call in list(self._ledger.calls()):
            if not call.is_sent:
                self._give(call)
