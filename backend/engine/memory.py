"""The memory of running rows and of the prompt cache, which they share.

First the prompt cache shrinks, then a row waits. A row that decodes beyond its expected length
pauses the last row of the lowest priority; if it is the only one, it ends, or waits for the
memory of other backends on the machine.
"""

from __future__ import annotations

import logging
import time
from itertools import islice
from typing import TYPE_CHECKING

import mlx.core as mx

from backend.engine.rows.admission import Reservations
from backend.engine.rows.row import Row
from backend.engine.rows.scheduler import Scheduler
from common.machine_memory import trim

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from backend.engine.prefix_store import PrefixStore

log = logging.getLogger(__name__)


class Memory:
    """Asked before a row may run or continue; belongs to the main thread.

    Its sums are as old as the latest change: see `note_change`.

    Attributes:
        has_changed: Whether `relieve` has something to look at.
        wants_rest: Whether ended work has freed memory that the system does not have back.
    """

    def __init__(
        self, reservations: Reservations, scheduler: Scheduler, prefixes: PrefixStore
    ) -> None:
        self.reservations = reservations
        self._scheduler = scheduler
        self._prefixes = prefixes
        self._starved_since: float | None = None
        self.has_changed = self.wants_rest = True

    @property
    def is_starved(self) -> bool:
        """Whether rows wait and none can run, because other backends hold the memory."""
        return self._starved_since is not None and bool(self._scheduler.waiting)

    def resize(self, budget_bytes: int, attainable_bytes: int) -> None:
        """Apply another budget: the prompt cache shrinks, running rows keep their memory.

        Args:
            budget_bytes: The limit for rows and prompt cache.
        """
        self.reservations.resize(budget_bytes, attainable_bytes)
        self._share()
        if not self._scheduler.slots_taken:
            # Memory freed by the prompt cache is for other backends.
            mx.clear_cache()

    def overdue(self, wait_s: float) -> list[Row]:
        """Return new rows that have waited this long for memory of other backends."""
        if self._starved_since is None or not self.reservations.may_grow:
            return []
        until = time.monotonic() - wait_s
        if self._starved_since > until:
            return []
        waiting = self._scheduler.waiting
        return [row for row in waiting if not row.generated and row.submitted_at <= until]

    def admit(self) -> list[Row]:
        """Admit rows while there are slots and memory, and return them."""
        admitted = self._scheduler.admit(self._reserve)
        for row in admitted:
            row.admit()
            self._prefixes.claim(row)
        if admitted:
            self._share()
        self._note_starvation()
        return admitted

    def note_change(self) -> None:
        """Have `relieve` look again: rows have other parts of the prompt cache, or their tokens."""
        self.has_changed = True

    def note_work(self) -> None:
        """Have `rest` look again: something was computed."""
        self.wants_rest = True

    def rest(self) -> None:
        """Return the memory that ended work has freed to the system, once per rest."""
        if self.wants_rest:
            self.wants_rest = False
            mx.clear_cache()
            trim()

    def relieve(self) -> None:
        """Pause rows if memory is short after all, and share the rest.

        A row that lost its part of the prompt cache needs its own memory for it.
        """
        self.reservations.used_tokens = self._prefixes.used_tokens
        while self.reservations.is_exceeded and (row := self._scheduler.yielding()):
            self.pause(row)
        self._share()
        self.has_changed = False

    def before_step(self) -> None:
        """Ensure memory for the next step; rows may pause or end for it.

        A row that pauses while it decodes leaves the batch with the next step: see `put_back`.
        """
        reserved = self.reservations.tokens
        grown = False
        for row in self._scheduler.active.copy():
            if row.fed >= reserved.get(row, 0):
                self._extend(row)
                grown = True
        if grown:
            self._share()

    def _extend(self, row: Row) -> None:
        while row.wants_more and not self.reservations.extend(row):
            if self.reservations.is_alone(row) and not self.reservations.may_grow:
                self._end(row)
                break
            self.pause(self._scheduler.yielding() or row)

    def put_back(self, row: Row) -> None:
        """Queue a row that has left the batch to pause."""
        if row.is_paused and not row.has_left:
            row.suspend()
            self._starved_since = None
            self.has_changed = True
            self._prefixes.claim(row)
            self._scheduler.put_back(row)

    def recover(self) -> None:
        """Queue rows that were about to leave the batch, after the batch was lost."""
        for row in list(self._scheduler.active):
            self.put_back(row)

    def release(self, row: Row) -> None:
        """Release a row's reservation."""
        self.reservations.release(row)
        self._share()

    def fitting_tokens(self, rows: Sequence[Row], tokens: int) -> int:
        """Return how many of so many tokens of one row or of several fit into a pass."""
        reservations = self.reservations
        free = reservations.left_bytes - self._prefixes.nbytes
        return reservations.fitting_tokens(max(row.fed for row in rows), tokens, max(free, 0))

    def status(self) -> Mapping[str, int]:
        """Return the reserved and the available bytes, as parts of `memory_bytes`."""
        next_rows = islice(self._scheduler.waiting, self._scheduler.free_slots)
        return {
            "kv_reserved": self.reservations.reserved_bytes,
            "kv_shared": self.reservations.shared_bytes,
            "kv_wanted": self.reservations.wanted_bytes(next_rows),
            "kv_budget": self.reservations.budget_bytes,
        }

    def check(self) -> None:
        """Raise AssertionError unless exactly the running rows have reserved memory."""
        running = (*self._scheduler.prefilling, *self._scheduler.active)
        self.reservations.check(row for row in running if not row.is_paused)

    def _note_starvation(self) -> None:
        """Record since when rows wait and none runs, right after an attempt to admit one."""
        if self._scheduler.slots_taken or not self._scheduler.waiting:
            self._starved_since = None
        elif self._starved_since is None:
            self._starved_since = time.monotonic()

    def _reserve(self, row: Row) -> bool:
        """Reserve a row's memory beyond its part of the prompt cache."""
        sharing = self._prefixes.sharable(row)
        if not self.reservations.reserve(row, sharing):
            return False
        self._prefixes.use(row, sharing.tokens)
        return True

    def _share(self) -> None:
        """Give the prompt cache the memory that the rows do not need."""
        self.has_changed = True
        self.reservations.approach()
        self._prefixes.leave_room(self.reservations.left_bytes)

    def pause(self, row: Row) -> None:
        """Take the memory of a row, which computes its tokens again later."""
        log.warning(
            "request id=%s pauses at %d generated tokens: others need its memory",
            row.request_id,
            row.generated,
        )
        row.pause()
        self.reservations.release(row)
        self._prefixes.use(row, 0)
        self.reservations.used_tokens = self._prefixes.used_tokens
        if row in self._scheduler.prefilling:
            self._prefixes.leave(row)
            self.put_back(row)

    def _end(self, row: Row) -> None:
        row.curtail()
        log.warning(
            "request id=%s ends at %d generated tokens: its KV cache fills all of the %d bytes "
            "that there are for it",
            row.request_id,
            row.max_tokens,
            self.reservations.budget_bytes,
        )
