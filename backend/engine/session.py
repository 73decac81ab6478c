"""One loaded model at work: its rows, its batch, and what happens in one turn of the engine."""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import mlx.core as mx

from backend.cache.windows import trim_windows
from backend.config import TuningOptions
from backend.core.request import GenerationRequest
from backend.core.status import EngineStatus
from backend.core.step import PrefillDone
from backend.engine.admission import Reservations
from backend.engine.batch import Batch, RowStep
from backend.engine.books import Books, Tally
from backend.engine.command import Fetched, SideCommand
from backend.engine.feeder import make_feeder
from backend.engine.isolation import Isolation
from backend.engine.keeper import Keeper
from backend.engine.memory_watch import MemoryWatch
from backend.engine.network import FreshCaches
from backend.engine.pace import Pace
from backend.engine.pacing import ChunkPacer, PrefillPace
from backend.engine.publisher import HandOver, Publisher
from backend.engine.row import Row
from backend.engine.scheduler import Scheduler
from backend.engine.side_jobs import SideJobs, SidePace
from backend.engine.side_work import SideWorkFactory
from backend.errors import BackendError, GenerationFailedError, GrammarError, OverloadedError
from backend.model.loaded import LoadedModel, RunnableModel

TURNS_PER_CLEAR = 32
IDLE_TIMEOUT_S = 1.0
PARKED_LIMIT_S = 10.0

log = logging.getLogger(__name__)


class Session:
    """Everything that lives as long as a loaded model; belongs to the engine thread.

    A turn may raise whatever a model raises: the caller hands it to `recover`, then goes on.
    """

    def __init__(
        self,
        model: RunnableModel,
        fresh_caches: FreshCaches,
        keeper: Keeper,
        reservations: Reservations,
        tuning: TuningOptions,
        hand_over: HandOver,
    ) -> None:
        """Start idle.

        Args:
            model: A model that belongs to this thread.
            fresh_caches: Makes its caches.
            keeper: Keeps its prefixes.
            reservations: What its KV caches may take.
            tuning: Its limits.
            hand_over: Takes the events of all requests, in order; must not block.
        """
        self.model = model
        self._fresh_caches = fresh_caches
        self._scheduler = Scheduler(
            max_slots=tuning.max_slots,
            max_active=tuning.max_slots if model.card.batches else 1,
        )
        self._batch = self._new_batch()
        self._pacer = ChunkPacer(
            cap=tuning.prefill_chunk,
            cap_alone=tuning.prefill_chunk_alone,
            pause_s=tuning.prefill_pause_ms / 1000.0,
        )
        self._keeper = keeper
        self._memory = MemoryWatch(reservations, self._scheduler, keeper)
        self._side_jobs = SideJobs(tuning.prefill_chunk, tuning.side_share)
        self._side_work = SideWorkFactory(model, fresh_caches, keeper, self._side_jobs)
        self._rows: dict[str, Row] = {}
        # Whom the present computation is for: if it raises, one of them is to blame.
        self._in_hand: Sequence[Row] = ()
        self._feeder = make_feeder(model.network, fresh_caches)
        self._isolation = Isolation(self._feeder, self._new_batch)
        self._publisher = Publisher(hand_over, tuning.max_replies_per_s)
        # On a CPU a dispatch takes as long as computing: a first token would wait for the second.
        self._dispatch_blocks = mx.default_device() == mx.Device(mx.cpu)
        self._turns = 0
        self._tally = Tally()
        self._books = Books(
            tally=self._tally,
            scheduler=self._scheduler,
            batch=self._batch,
            memory=self._memory,
            keeper=keeper,
            side_jobs=self._side_jobs,
            media=self._feeder.media,
            weights_bytes=model.card.weights_bytes,
        )

    @property
    def is_idle(self) -> bool:
        """Whether a turn would have nothing to do."""
        return self._scheduler.is_idle and self._batch.is_empty and self._side_jobs.is_idle

    @property
    def idle_timeout_s(self) -> float | None:
        """How long to wait for a command before the next turn and `rest`; `None` is for ever."""
        return IDLE_TIMEOUT_S if self._scheduler.parked or self._keeper.wants_rest else None

    @property
    def checksum(self) -> int:
        """Sums up all tokens drawn so far, in their order."""
        return self._tally.checksum

    def plain_model(self) -> LoadedModel:
        """Return what may cross the thread line, with what the caches tell of the model."""
        card = replace(self.model.card, reuses_at_boundaries_only=self._keeper.needs_boundaries)
        return replace(self.model.plain(), card=card)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request, or refuse it at once if its KV cache could never fit."""
        row = Row(request)
        try:
            self._memory.require_fit(row)
        except OverloadedError as error:
            self._publisher.put(row.request_id, error, is_urgent=True)
            self._publisher.flush()
            return
        self._rows[request.request_id] = row
        self._in_hand = (row,)
        place = self._scheduler.park if self._keeper.fetch(row) else self._scheduler.enqueue
        place(row)
        self._in_hand = ()

    def work_aside(self, command: SideCommand) -> None:
        """Queue what is computed between steps."""
        self._side_jobs.add(self._side_work.make(command), command.reply)

    @property
    def has_ended_aside(self) -> bool:
        """Whether results of such work wait for `answer_aside`."""
        return self._side_jobs.has_ended

    def answer_aside(self) -> None:
        """Hand out the results of work between steps."""
        self._side_jobs.answer()

    def take_in(self, fetched: Fetched) -> None:
        """Go on with a request that waited for the disk."""
        self._keeper.take_in(fetched)
        if row := self._rows.get(fetched.request_id):
            self._scheduler.unpark(row)

    def rest(self) -> None:
        """Do what can wait until nothing else is to do."""
        self._keeper.rest()

    def close(self) -> None:
        """End for good, after every request has ended."""
        self._keeper.close()

    def cancel(self, request_id: str) -> None:
        """Drop a request and free its slot; no effect when it has ended or was never known."""
        if row := self._rows.get(request_id):
            self._drop(row)

    def fail_all(self, error: BackendError) -> None:
        """End every request with an error."""
        for row in list(self._rows.values()):
            self._fail(row, error)
        self._side_jobs.fail_all(error)
        self._batch.clear()
        self._publisher.flush()

    def pace(self) -> Pace:
        """Return what the clock allows the next turn."""
        return Pace(self._pacer.pace(), self._side_jobs.pace())

    def turn(self, pace: Pace | None = None) -> None:
        """Admit, then run one prefill chunk or one decode step.

        Args:
            pace: What the clock allows; `None` looks at it.
        """
        pace = pace or self.pace()
        self._admit()
        if suspect := self._isolation.next_suspect():
            self._in_hand = (suspect,)
            self._isolation.try_alone(suspect, self._settle)
        else:
            self._join()
            self._compute(pace)
        self._publisher.hurry()
        self._turns += 1
        if self._turns % TURNS_PER_CLEAR == 0:
            self._clear_cache()
        self._in_hand = ()

    def recover(self, error: Exception) -> None:
        """Fail the row that the last turn failed on; of several, find out which one it was.

        Rows that failed together lose their KV caches, are tried alone in the next turns, and
        go on where they were if that works. A row with a prefix from the prompt cache gets a
        second chance without.
        """
        rows, self._in_hand = [row for row in self._in_hand if not row.has_left], ()
        self._forget_ended(self._rows.values())
        self._publisher.hurry()
        if self._side_jobs.blame(error):
            return
        if len(rows) != 1 or (rows[0].cached_tokens and rows[0] in self._scheduler.active):
            self._batch.clear()
            self._memory.recover()
            self._isolation.suspect(self._scheduler.deactivate(), error)
            if self._isolation.batches_keep_failing:
                self._scheduler.max_active = 1
        elif rows[0].cached_tokens:
            log.warning(
                "request %s failed behind a cached prefix", rows[0].request_id, exc_info=error
            )
            rows[0].rewind()
        else:
            self._blame(rows[0], error)

    def status(self) -> EngineStatus:
        """Return a snapshot."""
        return self._books.status()

    def check(self) -> None:
        """Raise AssertionError unless the books balance."""
        self._scheduler.check()
        self._keeper.check()
        self._memory.check()
        if set(self._scheduler.rows()) != set(self._rows.values()):
            raise AssertionError("the scheduler and the session know different rows")

    def _admit(self) -> None:
        now = time.monotonic()
        for row in list(self._scheduler.parked):
            if now > row.submitted_at + PARKED_LIMIT_S:
                log.warning("request id=%s waits no longer for the disk", row.request_id)
                self._scheduler.unpark(row)
        self._memory.admit()

    def _compute(self, pace: Pace) -> None:
        """Run a chunk, unless there is none or decoding rows have waited long enough."""
        row = self._scheduler.next_prefill()
        has_room = pace.prefill.has_room or not self._scheduler.active
        if row is not None and has_room:
            self._prefill(row, pace.prefill)
        else:
            self._decode()
        if row is None or has_room:
            # Else the pause that has just begun is for the prompt that waits.
            self._compute_aside(pace.aside)

    def _compute_aside(self, pace: SidePace) -> None:
        """Run a piece of a side job, if there is one and the rows have had their share."""
        is_alone = self._scheduler.is_idle
        if self._side_jobs.is_computing and (is_alone or pace.has_rested):
            # Nobody's token waits for the piece.
            self._land()
            self._publisher.flush()
            self._side_jobs.advance(pace, is_alone=is_alone)

    def _prefill(self, row: Row, pace: PrefillPace) -> None:
        # Nobody's token waits for the chunk.
        self._land()
        self._publisher.flush()
        self._in_hand = (row,)
        self._keeper.restore(row)
        self._feeder.align(row)
        if row.prefill_left == 0:
            return
        room = self._keeper.room(row)
        budget = (pace.beside if self._scheduler.active else pace.alone).chunk(room)
        fed, started = row.fed, time.monotonic()
        self._feeder.feed(row, budget)
        self._keeper.save(row)
        trim_windows(row.cache or ())
        if row.media_at(fed) is None:
            self._pacer.record(row.fed - fed, time.monotonic() - started)
        self._tally.prompt_tokens += row.fed - fed

    def _decode(self) -> None:
        if self._batch.is_empty:
            return
        if self._dispatch_blocks and self._batch.awaits_first_token:
            self._land()
            self._publisher.flush()
        self._memory.before_step()
        self._in_hand = tuple(self._scheduler.active)
        self._batch.step(meanwhile=self._settle, landed=self._publish)
        # Nobody's last token waits until what is stored has been copied.
        self._publisher.hurry()
        for row, problem in self._batch.astray():
            self._fail(row, GrammarError(f"cannot be followed any further: {problem}"))
        for row in self._batch.departed():
            self._let_go(row)
            self._memory.put_back(row)
        self._pacer.begin_pause()
        if len(self._in_hand) > 1:
            self._isolation.explain()

    def _join(self) -> None:
        for row in self._scheduler.activate():
            self._batch.add(row)
            if row.drawn == 0:
                self._publisher.put(row.request_id, _prefill_done(row))

    def _land(self) -> None:
        self._in_hand = tuple(self._scheduler.active)
        self._publish(self._batch.land())

    def _publish(self, steps: Sequence[RowStep]) -> None:
        for row, step in steps:
            self._publisher.put(row.request_id, step, is_urgent=row.has_left or row.generated == 1)
            self._tally.count(step.token_id)
        # Behind all of them: what fails here costs nobody a token.
        for row, _ in steps:
            if row.generated == 1:
                self._keeper.record(row)
        self._forget_ended(row for row, _ in steps)

    def _settle(self) -> None:
        self._publisher.settle(len(self._scheduler.active))

    def _clear_cache(self) -> None:
        """Give freed buffers back; with work in flight MLX would hold the GIL until it is done."""
        self._land()
        mx.clear_cache()

    def _blame(self, row: Row, error: Exception) -> None:
        self._isolation.explain()
        log.error("request %s failed", row.request_id, exc_info=error)
        if row in self._scheduler.active:
            self._batch.clear()
        self._fail(row, GenerationFailedError(f"the model failed on this request: {error}"))
        self._publisher.flush()

    def _new_batch(self) -> Batch:
        return Batch(self.model.network, self._fresh_caches, self.model.card.vocab_size)

    def _fail(self, row: Row, error: BackendError) -> None:
        # What a failed pass has left in the caches must not be stored.
        row.cache = None
        self._publisher.put(row.request_id, error, is_urgent=True)
        self._drop(row)

    def _drop(self, row: Row) -> None:
        row.has_left = True
        self._forget(row)

    def _forget(self, row: Row) -> None:
        self._scheduler.release(row)
        # First, so that what the row leaves in the prompt cache finds room there.
        self._memory.release(row)
        self._let_go(row)
        self._rows.pop(row.request_id, None)

    def _forget_ended(self, rows: Iterable[Row]) -> None:
        for row in [row for row in rows if row.has_left]:
            self._forget(row)

    def _let_go(self, row: Row) -> None:
        self._keeper.leave(row)
        row.cache = None


def _prefill_done(row: Row) -> PrefillDone:
    return PrefillDone(
        cached_tokens=row.cached_tokens,
        prefill_ms=(time.monotonic() - row.admitted_at) * 1000.0,
        hit_kind=row.hit_kind,
    )
