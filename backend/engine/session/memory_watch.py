"""Keeps running rows and the prompt cache within the memory that they share.

First the prompt cache gives way, then a row waits. A row that decodes beyond what was expected of
it makes the last row of the least priority pause; if it is the only one, it ends, or waits for the
memory that other backends of the machine have.
"""

from __future__ import annotations

import logging
import time
from itertools import islice
from typing import TYPE_CHECKING

from backend.engine.rows.admission import Reservations
from backend.engine.rows.row import Row
from backend.engine.rows.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from backend.engine.prefixes.store import PrefixStore

log = logging.getLogger(__name__)


class MemoryWatch:
    """Asked before a row may run or go on; belongs to the main thread."""

    def __init__(
        self, reservations: Reservations, scheduler: Scheduler, prefixes: PrefixStore
    ) -> None:
        """Start with nothing reserved.

        Args:
            reservations: Of the running rows, with the budget.
            scheduler: Knows who runs and who gives way.
            prefixes: Gives room back, and stores what a row that pauses has computed.
        """
        self._reservations = reservations
        self._scheduler = scheduler
        self._prefixes = prefixes
        self._starved_since: float | None = None

    @property
    def is_starved(self) -> bool:
        """Whether rows wait and none could be let run: the memory is with other backends."""
        return self._starved_since is not None and bool(self._scheduler.waiting)

    def resize(self, budget_bytes: int, attainable_bytes: int) -> None:
        """Keep to another budget: the prompt cache gives way, running rows do not.

        Args:
            budget_bytes: What rows and prompt cache may take.
            attainable_bytes: What the budget may become.
        """
        self._reservations.resize(budget_bytes, attainable_bytes)
        self._share()

    def overdue(self, wait_s: float) -> list[Row]:
        """Return new rows that have waited so long for memory of other backends."""
        if self._starved_since is None or not self._reservations.may_grow:
            return []
        until = time.monotonic() - wait_s
        if self._starved_since > until:
            return []
        waiting = self._scheduler.waiting
        return [row for row in waiting if not row.generated and row.submitted_at <= until]

    def require_fit(self, row: Row) -> None:
        """Refuse a row that would not fit if it were alone.

        Raises:
            OverloadedError: Holds the numbers.
        """
        self._reservations.require_fit(row)

    def admit(self) -> list[Row]:
        """Let rows run for which there are slots and memory, and return them."""
        admitted = self._scheduler.admit(self._reserve)
        for row in admitted:
            row.admitted_at = time.monotonic()
        if admitted:
            for row in admitted:
                self._prefixes.claim(row)
            self._share()
        self._note_starvation()
        return admitted

    def relieve(self) -> None:
        """Let rows pause if there is too little memory after all, and share what is left.

        A row that has lost what it used of the prompt cache needs its own memory for it.
        """
        self._reservations.used_tokens = self._prefixes.used_tokens
        while self._reservations.is_exceeded and (row := self._scheduler.yielding()):
            self._pause(row)
        self._share()

    def before_step(self) -> None:
        """Make sure that the next step has memory; rows may pause or end for it.

        A row that pauses while it decodes leaves the batch with the next step: see `put_back`.
        """
        for row in list(self._scheduler.active):
            while row.wants_more and not self._reservations.extend(row):
                if self._reservations.is_alone(row) and not self._reservations.may_grow:
                    self._end(row)
                    break
                self._pause(self._scheduler.yielding() or row)
        self._share()

    def put_back(self, row: Row) -> None:
        """Let a row that has left the batch in order to pause wait for its turn."""
        if row.is_paused and not row.has_left:
            row.suspend()
            self._starved_since = None
            self._prefixes.claim(row)
            self._scheduler.put_back(row)

    def recover(self) -> None:
        """Let rows that were about to leave the batch wait, after the batch was lost."""
        for row in list(self._scheduler.active):
            self.put_back(row)

    def release(self, row: Row) -> None:
        """Give back what a row has reserved."""
        self._reservations.release(row)
        self._share()

    def status(self) -> Mapping[str, int]:
        """Return the reserved and the available bytes, as parts of `memory_bytes`."""
        return {
            "kv_reserved": self._reservations.reserved_bytes,
            "kv_shared": self._reservations.shared_bytes,
            "kv_wanted": self._reservations.wanted_bytes(self._next_rows()),
            "kv_budget": self._reservations.budget_bytes,
        }

    def _next_rows(self) -> Iterator[Row]:
        """Yield the waiting rows for which there are slots."""
        return islice(self._scheduler.waiting, self._scheduler.free_slots)

    def held_bytes(self, row: Row) -> tuple[int, int]:
        """Return what a row's KV cache takes by itself, and what it uses of the prompt cache."""
        return self._reservations.held_bytes(row)

    def check(self) -> None:
        """Raise AssertionError unless just the running rows have reserved memory."""
        running = (*self._scheduler.prefilling, *self._scheduler.active)
        self._reservations.check(row for row in running if not row.is_paused)

    def _note_starvation(self) -> None:
        """Note since when rows wait and none runs, though somebody has just tried to admit one."""
        if self._scheduler.slots_taken or not self._scheduler.waiting:
            self._starved_since = None
        elif self._starved_since is None:
            self._starved_since = time.monotonic()

    def _reserve(self, row: Row) -> bool:
        """Reserve what a row needs beyond what it finds in the prompt cache."""
        sharing = self._prefixes.sharable(row)
        if not self._reservations.reserve(row, sharing):
            return False
        self._prefixes.use(row, sharing.tokens)
        return True

    def _share(self) -> None:
        """Leave the prompt cache what the rows do not need."""
        self._reservations.approach()
        self._prefixes.leave_room(self._reservations.left_bytes)

    def _pause(self, row: Row) -> None:
        log.warning(
            "request id=%s pauses at %d generated tokens: others need its memory",
            row.request_id,
            row.generated,
        )
        row.is_paused = True
        self._reservations.release(row)
        self._prefixes.use(row, 0)
        self._reservations.used_tokens = self._prefixes.used_tokens
        if row in self._scheduler.prefilling:
            self._prefixes.leave(row)
            self.put_back(row)

    def _end(self, row: Row) -> None:
        row.curtail()
        log.warning(
            "request id=%s ends at %d generated tokens: its KV cache fills all of the %d bytes "
            "that there are for it",
            row.request_id,
            row.request.max_tokens,
            self._reservations.budget_bytes,
        )
