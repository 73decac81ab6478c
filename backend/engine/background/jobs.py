"""Background jobs: embeddings and scores, in pieces between the steps of the batch.

A job is a generator: it computes at most one forward pass, yields, and returns its result. Jobs
have fair turns by their tokens, and run one after another, so that at most one of them holds a
large KV cache: a short one waits for no long ones, and goes between the passes of one.
"""

import logging
import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from inspect import GEN_CREATED, getgeneratorstate
from typing import TypeAlias

from backend.engine.rows.pacing import ChunkSizer, FairTurns
from backend.errors import BackendError, GenerationFailedError

# Target duration of a piece, with and without running requests.
PIECE_S = 0.1
PIECE_ALONE_S = 0.2
# Of a job that goes between the passes of another: both hold caches.
MAX_PASSING_TOKENS = 2048

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


class BackgroundJobs:
    """The waiting and running jobs; belongs to the main thread.

    Attributes:
        jobs: By their numbers, in the order of their arrival.
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
        self.jobs: dict[int, Job] = {}
        self.ended: list[tuple[int, object]] = []
        self._sizer_alone = ChunkSizer.limited(PIECE_ALONE_S, max_chunk, limit_s)
        self._sizer_shared = ChunkSizer.limited(PIECE_S, max_chunk, limit_s)
        self._turns: FairTurns[int] = FairTurns()
        self._tokens: dict[int, int] = {}
        self._begun: int | None = None
        self._passing: int | None = None
        self._current: int | None = None
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
        return any(getgeneratorstate(job) != GEN_CREATED for job in self.jobs.values())

    def pace(self) -> BackgroundPace:
        """Return the work allowed now: requests keep most of the time."""
        has_rested = time.monotonic() >= self._resumes_at
        return BackgroundPace(has_rested, self._sizer_shared.size, self._sizer_alone.size)

    def add(self, number: int, job: Job, tokens: int = 0) -> None:
        """Queue a job of so many tokens under a number of its own."""
        self.jobs[number] = job
        self._tokens[number] = tokens
        self._turns.add(number)

    def drop(self, number: int) -> None:
        """Forget a job whose caller has left; no effect if it has ended."""
        if number in self.jobs:
            self._close(number)

    def chunk_size(self, left: int) -> int:
        """Return how many of the `left` tokens go into the present piece."""
        self._chunk = min(left, self._limit)
        return self._chunk

    def advance(self, pace: BackgroundPace, *, is_alone: bool) -> None:
        """Compute a piece of the job in turn; passes on the model's errors, see `blame`."""
        if not self.jobs:
            return
        number = self._current = self._in_turn()
        job = self.jobs[number]
        self._limit = pace.alone if is_alone else pace.shared
        self._chunk = 0
        started = time.monotonic()
        try:
            next(job)
        except StopIteration as end:
            self._end(number, end.value)
        except BackendError as error:
            self._end(number, error)
        self._current = None
        elapsed = time.monotonic() - started
        if self._chunk:
            sizer = self._sizer_alone if is_alone else self._sizer_shared
            sizer.record(self._chunk, elapsed)
            self.computed_tokens += self._chunk
        self._resumes_at = time.monotonic() + elapsed * (1.0 / self._share - 1.0)

    def _in_turn(self) -> int:
        """Return the job that has begun, or a short one that passes it; either runs to its end."""
        if self._passing in self.jobs:
            return self._passing
        number = self._turns.next(self._tokens.__getitem__)
        if self._begun not in self.jobs:
            self._begun = number
        elif number != self._begun and self._tokens[number] <= MAX_PASSING_TOKENS:
            self._passing = number
            return number
        return self._begun

    def conclude(self, number: int, result: object) -> None:
        """End a job that has not started: another one has computed its result."""
        if number in self.jobs:
            self._end(number, result)

    def blame(self, error: Exception) -> bool:
        """Fail the job that was being computed; false if there was none."""
        failed, self._current = self._current, None
        if failed is None:
            return False
        log.error("a background computation failed", exc_info=error)
        self._end(failed, GenerationFailedError.of_model(error))
        return True

    def take_ended(self) -> list[tuple[int, object]]:
        """Return the jobs that ended since the last call, with their results or errors."""
        ended, self.ended = self.ended, []
        return ended

    def _end(self, number: int, result: object) -> None:
        self._turns.spend(number, self._tokens[number])
        self._close(number)
        self.ended.append((number, result))

    def _close(self, number: int) -> None:
        self._turns.remove(number)
        del self._tokens[number]
        self.jobs.pop(number).close()
