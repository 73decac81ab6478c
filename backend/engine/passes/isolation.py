"""Finds the request that made a step fail, by trying each alone."""

import logging
from collections.abc import Callable, Sequence

from backend.engine.passes.attempt import RowStep
from backend.engine.passes.batch import Batch
from backend.engine.passes.feeder import Feeder
from backend.engine.rows.row import Row

MAX_UNEXPLAINED_FAILURES = 2
TRIAL_CHUNK_TOKENS = 512

log = logging.getLogger(__name__)


class Isolation:
    """The rows under suspicion; belongs to the main thread.

    Attributes:
        batches_keep_failing: Whether steps keep failing without a guilty request.
    """

    def __init__(self, feeder: Feeder, new_batch: Callable[[], Batch]) -> None:
        """Start without suspects.

        Args:
            feeder: Feeds prompts.
            new_batch: Creates a batch for one row.
        """
        self._feeder = feeder
        self._new_batch = new_batch
        self._suspects: list[Row] = []
        self._unexplained_failures = 0

    @property
    def batches_keep_failing(self) -> bool:
        """Whether no request was to blame for the last failures."""
        return self._unexplained_failures > MAX_UNEXPLAINED_FAILURES

    def suspect(self, rows: Sequence[Row], error: Exception) -> None:
        """Take rows that failed together; they lose their KV caches."""
        log.warning("a step of %d requests failed, trying each alone", len(rows), exc_info=error)
        self._unexplained_failures += len(rows) > 1
        if self.batches_keep_failing:
            log.warning("batches of this model keep failing: one request at a time from now on")
        self._suspects = list(rows)
        for row in rows:
            row.rewind()

    def explain(self) -> None:
        """Record that a request was to blame, or that batches work after all."""
        self._unexplained_failures = 0

    def next_suspect(self) -> Row | None:
        """Return a row to try before anything else is computed."""
        while self._suspects:
            row = self._suspects.pop()
            if not row.has_left:
                return row
        return None

    def try_alone(self, row: Row, meanwhile: Callable[[], None]) -> None:
        """Run a twin of the row from its first token to its next; raises if the row is to blame."""
        twin = row.twin()
        while left := twin.prefill_left:
            self._feeder.feed(twin, min(left, TRIAL_CHUNK_TOKENS))
        trial = self._new_batch()
        trial.add(twin)
        steps: list[RowStep] = []
        while not steps:
            trial.step(meanwhile=meanwhile, landed=steps.extend)
