"""Work beside generation: embeddings and scores, in pieces between the steps of the batch.

A job is a generator: it computes at most one forward pass, yields, and returns its result. Jobs
run one after another, so that at most one of them holds a KV cache.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

from backend.engine.command import answer
from backend.errors import BackendError, GenerationFailedError

# How long a piece should take, while requests run and while none does.
PIECE_S = 0.1
PIECE_ALONE_S = 0.2
MIN_CHUNK = 16
FIRST_CHUNK = 64

log = logging.getLogger(__name__)

SideWork: TypeAlias = Generator[None, None, object]

ChunkSize: TypeAlias = Callable[[int], int]
"""How many of the tokens that are left go into the next pass."""


@dataclass(frozen=True, slots=True)
class SidePace:
    """What the clock allows the next turn, as a plain value.

    Attributes:
        has_rested: Whether requests have had their share of the time since the last piece.
        beside: Tokens of a piece while requests run.
        alone: Tokens of a piece while none does.
    """

    has_rested: bool
    beside: int
    alone: int


@dataclass(slots=True)
class ChunkSizer:
    """Finds how many tokens a pass may have for the time it should take, by trying.

    A pass has costs that do not depend on its tokens: dividing time by tokens would tell a wrong
    rate, and chunks that are too small for good.

    Attributes:
        cap: Largest chunk.
        target_s: How long a pass should take.
    """

    cap: int
    target_s: float
    _size: int = FIRST_CHUNK

    @property
    def size(self) -> int:
        """How many tokens go into the next pass at most."""
        return min(self._size, self.cap)

    def chunk(self, left: int) -> int:
        """Return how many of the `left` tokens go into the next pass."""
        return min(left, self.size)

    def record(self, tokens: int, seconds: float) -> None:
        """Learn from a pass: one that is not full tells only if it was slow."""
        if seconds > 1.5 * self.target_s:
            self._size = max(min(tokens, self._size) // 2, MIN_CHUNK)
        elif seconds < 0.6 * self.target_s and tokens >= self._size:
            self._size = min(2 * self._size, self.cap)


@dataclass(frozen=True, eq=False, slots=True)
class _Job:
    work: SideWork
    reply: "Future[Any]"


class SideJobs:
    """The jobs that wait or run, first come first served; belongs to the engine thread."""

    def __init__(self, max_chunk: int, share: float) -> None:
        """Start without jobs.

        Args:
            max_chunk: Tokens in one forward pass at most.
            share: Of the time, while requests run; above 0.
        """
        self._share = share
        self._jobs: deque[_Job] = deque()
        self._ended: list[tuple[Future[Any], object]] = []
        self._sizer_alone = ChunkSizer(max_chunk, PIECE_ALONE_S)
        self._sizer_beside = ChunkSizer(max_chunk, PIECE_S)
        self._in_hand: _Job | None = None
        self._limit = 0
        self._chunk = 0
        self._resumes_at = 0.0
        self._computed_tokens = 0

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute, and nothing to tell."""
        return not self._jobs and not self._ended

    @property
    def has_ended(self) -> bool:
        """Whether somebody waits for the result of a job that has ended."""
        return bool(self._ended)

    @property
    def is_computing(self) -> bool:
        """Whether there is something to compute."""
        return bool(self._jobs)

    @property
    def count(self) -> int:
        """How many jobs wait or run."""
        return len(self._jobs)

    @property
    def computed_tokens(self) -> int:
        """Tokens that went through the model, as far as jobs asked how many may."""
        return self._computed_tokens

    def pace(self) -> SidePace:
        """Return what may be computed now: requests keep most of the time."""
        has_rested = time.monotonic() >= self._resumes_at
        return SidePace(has_rested, self._sizer_beside.size, self._sizer_alone.size)

    def add(self, work: SideWork, reply: "Future[Any]") -> None:
        """Queue a job; its reply gets the result, and cancelling the reply drops the job."""
        self._jobs.append(_Job(work, reply))

    def chunk_size(self, left: int) -> int:
        """Return how many of the `left` tokens go into the piece that is being computed."""
        self._chunk = min(left, self._limit)
        return self._chunk

    def advance(self, pace: SidePace, *, is_alone: bool) -> None:
        """Compute a piece of the first job; raises what its model raises, then see `blame`."""
        self._drop_cancelled()
        if not self._jobs:
            return
        job = self._in_hand = self._jobs[0]
        self._limit = pace.alone if is_alone else pace.beside
        self._chunk = 0
        started = time.monotonic()
        try:
            next(job.work)
        except StopIteration as end:
            self._end(job, end.value)
        except BackendError as error:
            self._end(job, error)
        self._in_hand = None
        elapsed = time.monotonic() - started
        if self._chunk:
            sizer = self._sizer_alone if is_alone else self._sizer_beside
            sizer.record(self._chunk, elapsed)
            self._computed_tokens += self._chunk
        self._resumes_at = time.monotonic() + elapsed * (1.0 / self._share - 1.0)

    def conclude(self, reply: "Future[Any]", result: object) -> None:
        """End a job that has not begun: another one has computed its result."""
        for job in [job for job in self._jobs if job.reply is reply]:
            self._end(job, result)

    def blame(self, error: Exception) -> bool:
        """Fail the job that was being computed; false when there was none."""
        job, self._in_hand = self._in_hand, None
        if job is None:
            return False
        log.error("a job beside generation failed", exc_info=error)
        self._end(job, GenerationFailedError(f"the model failed on this request: {error}"))
        return True

    def fail_all(self, error: BackendError) -> None:
        """End every job with an error."""
        for job in list(self._jobs):
            self._end(job, error)
        self.answer()

    def answer(self) -> None:
        """Give the results of jobs that have ended to whom they belong."""
        ended, self._ended = self._ended, []
        for reply, result in ended:
            answer(reply, result)

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._jobs if job.reply.cancelled()]:
            self._end(job, None)

    def _end(self, job: _Job, result: object) -> None:
        job.work.close()
        self._jobs.remove(job)
        self._ended.append((job.reply, result))
