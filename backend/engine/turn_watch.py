"""Reports a turn of the engine that takes too long: it may be stuck in MLX, or stopped."""

import asyncio
import logging
from collections.abc import Callable

LOOKS_PER_LIMIT = 24

log = logging.getLogger(__name__)


class TurnWatch:
    """Checks an engine regularly, until it ends; belongs to an event loop."""

    def __init__(
        self,
        turn_s: Callable[[], float],
        is_alive: Callable[[], bool],
        limit_s: float,
        *,
        lost_after_s: float = 0.0,
        give_up: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Create a watch; `look` starts it.

        Args:
            turn_s: Duration of the present turn; 0 between turns.
            is_alive: Whether the engine still exists.
            limit_s: A longer turn is too long, in seconds.
            lost_after_s: After a longer turn the engine is given up; 0 is never.
            give_up: Called with the duration of the turn.
        """
        self._turn_s = turn_s
        self._is_alive = is_alive
        self._limit_s = limit_s
        self._lost_after_s = lost_after_s
        self._give_up = give_up
        self._told_s = 0.0

    def look(self) -> None:
        """Log a turn that is too long, and again whenever it has doubled; check again later."""
        if not self._is_alive():
            return
        turn_s = self._turn_s()
        self._judge(turn_s)
        if self._lost_after_s and turn_s >= self._lost_after_s:
            self._give_up(turn_s)
            return
        limit_s = min(self._limit_s, self._lost_after_s or self._limit_s)
        asyncio.get_running_loop().call_later(limit_s / LOOKS_PER_LIMIT, self.look)

    def _judge(self, turn_s: float) -> None:
        if turn_s < self._told_s:
            log.warning("the engine goes on, after more than %.0f s in one turn", self._told_s)
            self._told_s = 0.0
        if turn_s >= max(self._limit_s, 2 * self._told_s):
            log.error("the engine has been in one turn for %.0f s: it may be stuck", turn_s)
            self._told_s = turn_s
