"""The requests of a loop, from their submission to their last event; none of this computes."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from backend.config import MEMORY_WAIT_S
from backend.core.request import GenerationRequest
from backend.engine.memory import Memory
from backend.engine.messages.protocol import Fetched
from backend.engine.passes.batch import RowStep
from backend.engine.port import Publisher
from backend.engine.prefix_store import PrefixStore
from backend.engine.rows.pacing import Counters
from backend.engine.rows.row import Row
from backend.engine.rows.scheduler import Scheduler
from backend.engine.suspects import Suspects
from backend.errors import BackendError, OverloadedError

FETCH_LIMIT_S = 10.0

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class OpenRequests:
    """Brings rows into the loop, publishes their tokens, and releases their slots and memory.

    Attributes:
        has_ended: Whether one has, of which no status has been sent since.
    """

    _scheduler: Scheduler
    _memory: Memory
    _prefixes: PrefixStore
    _suspects: Suspects
    _publisher: Publisher
    _counters: Counters
    has_ended: bool = False

    def submit(
        self, request: GenerationRequest, generated: Sequence[int] = (), losses: int = 0
    ) -> None:
        """Queue a request, or refuse it at once if its KV cache could never fit.

        Args:
            generated: Tokens of its reply drawn earlier: the row continues after them.
            losses: Engines lost over it since.
        """
        row = Row.resumed(request, generated, losses)
        try:
            self._memory.reservations.require_fit(row)
        except OverloadedError as error:
            self._publisher.put(row.request_id, error, is_urgent=True)
            self._publisher.flush()
            return
        with self._suspects([row]):
            if self._prefixes.fetch(row):
                self._scheduler.await_fetch(row)
            else:
                self._scheduler.enqueue(row)

    def may_prefill(self, row: Row) -> bool:
        """Tell whether a prompt may go on; refuse it if its passes have shown that it cannot."""
        try:
            self._memory.reservations.require_fit(row)
        except OverloadedError as error:
            self.fail(row, error)
            return False
        return True

    def take_in(self, fetched: Fetched) -> None:
        """Resume a request that waited for the disk."""
        self._prefixes.take_in(fetched)
        if row := self._scheduler.find(fetched.request_id):
            self._scheduler.end_fetch(row)

    def cancel(self, request_id: str) -> None:
        """Drop a request and free its slot; no effect if it has ended or was never known."""
        if row := self._scheduler.find(request_id):
            row.finish()
            self.forget(row)

    def admit(self) -> None:
        """Give slots to waiting rows; one whose prefix is on disk waits for it so long.

        New rows that have waited too long for memory of other backends fail.
        """
        now = time.monotonic()
        for row in list(self._scheduler.fetching):
            if now > row.submitted_at + FETCH_LIMIT_S:
                log.warning("request id=%s no longer waits for the disk", row.request_id)
                self._scheduler.end_fetch(row)
        self._memory.admit()
        for row in self._memory.overdue(MEMORY_WAIT_S):
            problem = (
                f"other backends of this machine hold the memory for its KV cache, and gave none "
                f"within {MEMORY_WAIT_S:.0f} s"
            )
            self.fail(row, OverloadedError(problem))

    def activate(self) -> Sequence[Row]:
        """Return the rows whose prompt is computed, which decode from now on."""
        rows = self._scheduler.activate()
        for row in rows:
            if row.drawn == 0:
                self._publisher.put(row.request_id, row.prefill_done(time.monotonic()))
        return rows

    def publish(self, steps: Sequence[RowStep]) -> None:
        """Publish tokens that have landed, and release the rows that have ended.

        The server reads them while the next pass is built.
        """
        firsts = []
        for row, step in steps:
            if is_first := len(row.token_ids) == row.prompt_tokens + 1:
                firsts.append(row)
            self._publisher.put(row.request_id, step, is_urgent=is_first or row.has_left)
            self._counters.count(step.token_id)
        # Last, so that a failure here costs no token.
        for row in firsts:
            self._prefixes.record(row)
        for row, _ in steps:
            if row.has_left:
                self.forget(row)
        self._publisher.flush(len(self._scheduler.active))

    def fail(self, row: Row, error: BackendError) -> None:
        """End a request with an error."""
        # A failed pass may have left anything in the caches.
        row.release()
        self._publisher.put(row.request_id, error, is_urgent=True)
        row.finish()
        self.forget(row)
        self._publisher.flush()

    def forget(self, row: Row) -> None:
        """Remove a row that has ended or whose caller has left."""
        self.has_ended = True
        self._suspects.forget(row)
        self._scheduler.remove(row)
        # First, to make room for the row's tokens in the prompt cache.
        self._memory.release(row)
        self.store_caches(row)

    def forget_ended(self) -> None:
        """Remove the rows that ended in a turn that failed."""
        for row in self._scheduler.rows():
            if row.has_left:
                self.forget(row)

    def store_caches(self, row: Row) -> None:
        """Store a row's computed tokens in the prompt cache, and drop its own caches."""
        self._prefixes.leave(row)
        row.release()
