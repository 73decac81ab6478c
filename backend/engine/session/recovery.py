"""After a failed pass: finds the request to blame, and resumes the others."""

import logging
from collections.abc import Callable, Sequence

from backend.engine.messages.publisher import Publisher
from backend.engine.passes.batch import Batch
from backend.engine.passes.isolation import Isolation
from backend.engine.rows.row import Row
from backend.engine.rows.scheduler import Scheduler
from backend.engine.session.memory_watch import MemoryWatch
from backend.engine.session.open_requests import OpenRequests
from backend.engine.session.pace import NotePass, ignore_pass
from backend.errors import GenerationFailedError

log = logging.getLogger(__name__)


class Recovery:
    """Decides which request fails when a pass raises; belongs to the main thread.

    Attributes:
        note_pass: Told the requests of each pass, before it starts.
    """

    def __init__(
        self,
        requests: OpenRequests,
        scheduler: Scheduler,
        memory: MemoryWatch,
        batch: Batch,
        isolation: Isolation,
        publisher: Publisher,
    ) -> None:
        """Start without suspects.

        Args:
            requests: Ends the one to blame.
            scheduler: Takes back rows that have lost their caches.
            memory: Queues rows that were about to pause.
            batch: Emptied when one of its passes fails.
            isolation: Tries suspects alone.
            publisher: Reports the error to the guilty request's caller.
        """
        self._requests = requests
        self._scheduler = scheduler
        self._memory = memory
        self._batch = batch
        self._isolation = isolation
        self._publisher = publisher
        self.note_pass: NotePass = ignore_pass
        self._rows: Sequence[Row] = ()

    @property
    def rows(self) -> Sequence[Row]:
        """The rows of the present computation: if it raises, one of them is to blame."""
        return self._rows

    @rows.setter
    def rows(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        if rows:
            self.note_pass([row.request_id for row in rows])

    def acquit(self) -> None:
        """Record that a pass of the batch has worked."""
        if len(self.rows) > 1:
            self._isolation.explain()

    def try_suspect(self, meanwhile: Callable[[], None]) -> bool:
        """Try one suspect alone, which raises if it is to blame; false if there is none.

        Args:
            meanwhile: Called while the device computes.
        """
        suspect = self._isolation.next_suspect()
        if suspect is None:
            return False
        self.rows = (suspect,)
        self._isolation.try_alone(suspect, meanwhile)
        return True

    def take_rows(self) -> list[Row]:
        """Return the rows of the failed computation that are still open."""
        rows, self.rows = self.rows, ()
        return [row for row in rows if not row.has_left]

    def blame(self, rows: Sequence[Row], error: Exception) -> None:
        """Fail the row that made a computation fail; of several, find out which.

        Rows that failed together lose their KV caches, are tried alone in the next turns, and
        resume where they were if that works. A row with a prefix from the prompt cache gets a
        second chance without it. Prompts that failed in one pass are fed one by one.

        Args:
            rows: The rows of the computation.
            error: Its error.
        """
        if len(rows) > 1 and rows[0] not in self._scheduler.active:
            self._part(rows, error)
        elif len(rows) != 1 or (rows[0].cached_tokens and rows[0] in self._scheduler.active):
            self._suspect_all(error)
        elif rows[0].cached_tokens:
            log.warning(
                "request id=%s failed on a cached prefix and is computed without it",
                rows[0].request_id,
                exc_info=error,
            )
            rows[0].rewind()
        else:
            self._fail(rows[0], error)

    def _part(self, rows: Sequence[Row], error: Exception) -> None:
        log.warning("prompts of %d requests failed, trying each alone", len(rows), exc_info=error)
        for row in rows:
            row.rewind()
            row.may_share_passes = False

    def _suspect_all(self, error: Exception) -> None:
        self._batch.clear()
        self._memory.recover()
        self._isolation.suspect(self._scheduler.deactivate(), error)
        if self._isolation.batches_keep_failing:
            self._scheduler.max_active = 1

    def _fail(self, row: Row, error: Exception) -> None:
        self._isolation.explain()
        log.error("request id=%s failed", row.request_id, exc_info=error)
        if row in self._scheduler.active:
            self._batch.clear()
        failure = GenerationFailedError(f"the model failed on this request: {error}")
        self._requests.fail(row, failure)
        self._publisher.flush()
