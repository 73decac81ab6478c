"""Background jobs: embeddings and scores, in pieces between the steps of the batch.

A job is a generator: it computes at most one forward pass, yields, and returns its result. Jobs
run one after another, so that at most one of them holds a KV cache.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from inspect import GEN_CREATED, getgeneratorstate
from typing import TypeAlias

from backend.engine.rows.pacing import ChunkSizer
from backend.errors import BackendError, GenerationFailedError

# Target duration of a piece, with and without running requests.
PIECE_S = 0.1
PIECE_ALONE_S = 0.2

log = logging.getLogger(__name__)

Job: TypeAlias = Generator[None, None, object]

ChunkSize: TypeAlias = Callable[[int], int]
"""Number of the remaining tokens that go into the next pass."""


@dataclass(frozen=True, slots=True)
class BackgroundPace:
    """The background work that the clock allows in the next turn, as a plain value.

    Attributes:
        has_rested: Whether requests had their share of the time since the last piece.
        shared: Tokens of a piece while requests run.
        alone: Tokens of a piece without running requests.
    """

    has_rested: bool
    shared: int
    alone: int


@dataclass(frozen=True, eq=False, slots=True)
class _Queued:
    number: int
    job: Job


class BackgroundJobs:
    """The waiting and running jobs, first come, first served; belongs to the main thread.

    Attributes:
        computed_tokens: By jobs that asked for a chunk size.
        ended: Those that have ended since they were taken, with their results or errors.
    """

    def __init__(self, max_chunk: int, share: float, limit_s: float = math.inf) -> None:
        """Start without jobs.

        Args:
            max_chunk: Tokens in one forward pass at most.
            share: Share of the time while requests run; above 0.
            limit_s: The longest pass.
        """
        self._share = share
        self.jobs: deque[_Queued] = deque()
        self.ended: list[tuple[int, object]] = []
        self._sizer_alone = ChunkSizer.limited(PIECE_ALONE_S, max_chunk, limit_s)
        self._sizer_shared = ChunkSizer.limited(PIECE_S, max_chunk, limit_s)
        self._current: _Queued | None = None
        self._limit = 0
        self._chunk = 0
        self._resumes_at = 0.0
        self.computed_tokens = 0

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute, and no result to deliver."""
        return not self.jobs and not self.ended

    @property
    def has_begun(self) -> bool:
        """Whether a job may hold caches."""
        return any(getgeneratorstate(queued.job) != GEN_CREATED for queued in self.jobs)

    def pace(self) -> BackgroundPace:
        """Return the work allowed now: requests keep most of the time."""
        has_rested = time.monotonic() >= self._resumes_at
        return BackgroundPace(has_rested, self._sizer_shared.size, self._sizer_alone.size)

    def add(self, number: int, job: Job) -> None:
        """Queue a job under a number of its own."""
        self.jobs.append(_Queued(number, job))

    def drop(self, number: int) -> None:
        """Forget a job whose caller has left; no effect if it has ended."""
        for queued in [queued for queued in self.jobs if queued.number == number]:
            queued.job.close()
            self.jobs.remove(queued)

    def holds(self, number: int) -> bool:
        """Tell whether a job waits or runs."""
        return any(queued.number == number for queued in self.jobs)

    def chunk_size(self, left: int) -> int:
        """Return how many of the `left` tokens go into the present piece."""
        self._chunk = min(left, self._limit)
        return self._chunk

    def advance(self, pace: BackgroundPace, *, is_alone: bool) -> None:
        """Compute a piece of the first job; passes on the model's errors, see `blame`."""
        if not self.jobs:
            return
        current = self._current = self.jobs[0]
        self._limit = pace.alone if is_alone else pace.shared
        self._chunk = 0
        started = time.monotonic()
        try:
            next(current.job)
        except StopIteration as end:
            self._end(current, end.value)
        except BackendError as error:
            self._end(current, error)
        self._current = None
        elapsed = time.monotonic() - started
        if self._chunk:
            sizer = self._sizer_alone if is_alone else self._sizer_shared
            sizer.record(self._chunk, elapsed)
            self.computed_tokens += self._chunk
        self._resumes_at = time.monotonic() + elapsed * (1.0 / self._share - 1.0)

    def conclude(self, number: int, result: object) -> None:
        """End a job that has not started: another one has computed its result."""
        for queued in [queued for queued in self.jobs if queued.number == number]:
            self._end(queued, result)

    def blame(self, error: Exception) -> bool:
        """Fail the job that was being computed; false if there was none."""
        failed, self._current = self._current, None
        if failed is None:
            return False
        log.error("a background computation failed", exc_info=error)
        self._end(failed, GenerationFailedError(f"the model failed on this request: {error}"))
        return True

    def take_ended(self) -> list[tuple[int, object]]:
        """Return the jobs that ended since the last call, with their results or errors."""
        ended, self.ended = self.ended, []
        return ended

    def _end(self, queued: _Queued, result: object) -> None:
        queued.job.close()
        self.jobs.remove(queued)
        self.ended.append((queued.number, result))
