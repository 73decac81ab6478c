"""The order of a turn: admission, then one piece of prefill, decoding or other work."""

import logging
import time

import mlx.core as mx

from backend.engine.rows.pacing import ChunkLimit
from backend.engine.rows.row import Row
from backend.engine.session.decoder_parts import DecoderParts
from backend.engine.session.pace import Pace

TURNS_PER_CLEAR = 32
FETCH_LIMIT_S = 10.0

log = logging.getLogger(__name__)


class Turns:
    """Runs the turns of a decoder's session; belongs to the main thread."""

    def __init__(self, parts: DecoderParts) -> None:
        """Start with the first turn.

        Args:
            parts: Of the session.
        """
        self._parts = parts
        self._count = 0

    def pace(self) -> Pace:
        """Return the work that the clock allows in the next turn."""
        return Pace(self._parts.pacer.pace(), self._parts.background.pace())

    def run(self, pace: Pace) -> None:
        """Admit, then run one prefill chunk or one decode step, and a piece of background work."""
        parts = self._parts
        self._admit()
        if not parts.recovery.try_suspect(parts.decoding.settle):
            parts.decoding.join()
            self._compute(pace)
        self._examine()
        parts.publisher.hurry()
        self._count += 1
        if self._count % TURNS_PER_CLEAR == 0:
            # With work in flight MLX would hold the GIL until it is done.
            parts.decoding.land()
            mx.clear_cache()
        parts.recovery.rows = ()
        parts.memory.relieve()

    def _admit(self) -> None:
        now = time.monotonic()
        for row in list(self._parts.scheduler.fetching):
            if now > row.submitted_at + FETCH_LIMIT_S:
                log.warning("request id=%s no longer waits for the disk", row.request_id)
                self._parts.scheduler.end_fetch(row)
        self._parts.memory.admit()

    def _compute(self, pace: Pace) -> None:
        """Run a chunk, unless there is none or decoding rows have waited long enough."""
        scheduler = self._parts.scheduler
        row = scheduler.next_prefill()
        has_room = pace.prefill.has_room or not scheduler.active
        if row is not None and has_room:
            self._parts.decoding.deliver()
            self._prefill(row, pace.prefill.shared if scheduler.active else pace.prefill.alone)
        elif not self._parts.batch.is_empty:
            self._parts.decoding.step()
            self._parts.pacer.begin_pause()
        if row is None or has_room:
            # Otherwise the new pause is for the waiting prompt.
            self._compute_background(pace)

    def _prefill(self, row: Row, limit: ChunkLimit) -> None:
        prefilling, recovery = self._parts.prefilling, self._parts.recovery
        companions = self._parts.scheduler.companions(row) if prefilling.takes_several else []
        recovery.rows = (row, *companions)
        if rows := prefilling.choose(row, companions, limit):
            recovery.rows = rows
            prefilling.feed(rows, limit)

    def _examine(self) -> None:
        """Compute a pass of the trials that are open, if no row runs, or if others wait for it."""
        parts, scheduler = self._parts, self._parts.scheduler
        # A job that holds caches goes on with the plan that it has begun with.
        if not parts.examination.is_running or parts.background.has_begun:
            return
        if scheduler.slots_taken and not scheduler.waiting:
            return
        parts.decoding.deliver()
        parts.recovery.rows = ()
        parts.recovery.note_pass((), has_job=True)
        parts.examination.advance()

    def _compute_background(self, pace: Pace) -> None:
        """Run a piece of background work, if there is any and the rows have had their share."""
        is_alone = self._parts.scheduler.is_idle
        background = self._parts.background
        if background.is_computing and (is_alone or pace.background.has_rested):
            self._parts.decoding.deliver()
            self._parts.recovery.note_pass((), has_job=True)
            background.advance(pace.background, is_alone=is_alone)
