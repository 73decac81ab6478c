"""Whom to blame for a failed pass: its only row, or one of several, found by trying each alone."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from backend.engine.memory import Memory
from backend.engine.passes.batch import Batch, RowStep
from backend.engine.port import Port
from backend.engine.prefilling import Prefilling
from backend.engine.rows.row import Row
from backend.engine.rows.scheduler import Scheduler

MAX_UNEXPLAINED_FAILURES = 2
TRIAL_CHUNK_TOKENS = 512

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Suspects:
    """The rows of the present pass, and those of failed ones; belongs to the main thread.

    `with suspects(rows):` surrounds a pass. The server hears of the rows before the pass, as it may
    end the process. If it raises, `accuse` finds the one to blame.

    Attributes:
        waiting: To be tried alone before anything else is computed.
    """

    _scheduler: Scheduler
    _memory: Memory
    _batch: Batch
    _prefilling: Prefilling
    _new_batch: Callable[[], Batch]
    _port: Port
    waiting: list[Row] = field(default_factory=list)
    _present: Sequence[Row] = ()
    _told: Sequence[Row] = ()
    _unexplained_failures: int = 0

    def __call__(self, rows: Sequence[Row]) -> Self:
        """Name the rows of the pass that follows."""
        self._present = rows
        if rows != self._told:
            self._told = list(rows)
            self._port.note_pass([row.request_id for row in rows])
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._present = ()

    def forget(self, row: Row) -> None:
        """Let go of a row that has ended."""
        if row in self._told:
            self._told = ()

    def note_job(self) -> None:
        """Tell the server that the next pass is a piece of a job."""
        self._told = ()
        self._port.note_pass((), has_job=True)

    def try_next(self) -> None:
        """Run a twin of a suspect from its first token to its next; raises if it is to blame."""
        row = self.waiting.pop()
        if row.has_left:
            return
        twin = row.twin()
        with self([row]):
            while left := twin.prefill_left:
                chunk = min(left, TRIAL_CHUNK_TOKENS, self._prefilling.chunk_tokens)
                self._prefilling.feeder.feed(twin, chunk)
            trial = self._new_batch()
            trial.add(twin)
            landed: list[RowStep] = []
            while not landed:
                for steps in trial.step():
                    landed += steps

    def acquit(self) -> None:
        """Record that several rows have decoded together: batches work."""
        self._unexplained_failures = 0

    def accuse(self, error: Exception) -> Row | None:
        """Return the row to blame for the failed pass, once it is certain.

        Rows that failed together lose their KV caches, are tried alone in the next turns, and
        resume where they were if that works. A row with a prefix from the prompt cache gets a
        second chance without it. Prompts that failed in one pass are fed one by one.
        """
        rows = [row for row in self._present if not row.has_left]
        self._present = ()
        is_decoding = bool(rows) and rows[0] in self._scheduler.active
        if len(rows) > 1 and not is_decoding:
            text = "prompts of %d requests failed, trying each alone"
            log.warning(text, len(rows), exc_info=error)
            for row in rows:
                row.isolate()
        elif len(rows) != 1 or (rows[0].cached_tokens and is_decoding):
            self._suspect_all(error)
        elif rows[0].cached_tokens:
            log.warning(
                "request id=%s failed on a cached prefix and is computed without it",
                rows[0].request_id,
                exc_info=error,
            )
            rows[0].rewind()
        else:
            self.acquit()
            if is_decoding:
                self._batch.clear()
            return rows[0]
        return None

    def _suspect_all(self, error: Exception) -> None:
        """Take all rows that decode; they lose their KV caches."""
        self._batch.clear()
        self._memory.recover()
        rows = self._scheduler.deactivate()
        log.warning("a step of %d requests failed, trying each alone", len(rows), exc_info=error)
        self._unexplained_failures += len(rows) > 1
        if self._unexplained_failures > MAX_UNEXPLAINED_FAILURES:
            log.warning("batches of this model keep failing: one request at a time from now on")
            self._scheduler.max_active = 1
        self.waiting = rows
        for row in rows:
            row.rewind()
