"""The loop of an engine process with a model that generates: one turn after another.

A turn receives commands, admits requests, computes one piece of prefill or one step of decoding
and possibly a piece of other work, delivers tokens, and reports. All ranks of a model run this
loop; they differ in their port. `docs/internals/architecture.md` tells the life of a turn.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import assert_never

import mlx.core as mx

from backend.config import MEMORY_WAIT_S, TuningOptions
from backend.core.engine_status import EngineStatus
from backend.core.model import ModelCard
from backend.core.prefix_listing import ListingRequest
from backend.core.request import GenerationRequest
from backend.engine.background.jobs import BackgroundJobs
from backend.engine.background.work import JobFactory
from backend.engine.examination import DELAY_S, Adoption, Examination
from backend.engine.memory import Memory
from backend.engine.messages.protocol import (
    Cancel,
    DiskChanged,
    Expect,
    Fetched,
    Job,
    Leave,
    PrepareMedium,
    Resize,
    SessionRequest,
    Stop,
    Submit,
    Told,
)
from backend.engine.parts import Resources, make_drafting, take_snapshot
from backend.engine.passes.batch import Batch, RowStep
from backend.engine.passes.caches import CacheFactory, try_device
from backend.engine.passes.feeder import make_feeder
from backend.engine.port import Command, Pace, Port, Publisher
from backend.engine.prefilling import Prefilling
from backend.engine.rows.pacing import Counters, PrefillPacer
from backend.engine.rows.row import Row
from backend.engine.rows.scheduler import Scheduler
from backend.engine.suspects import Suspects
from backend.errors import (
    BackendError,
    DeviceLostError,
    GenerationFailedError,
    GrammarError,
    OverloadedError,
)
from backend.model.device import DEVICE
from backend.model.loaded import RunnableModel
from common.machine_memory import trim

IDLE_TIMEOUT_S = 1.0
FETCH_LIMIT_S = 10.0

log = logging.getLogger(__name__)


class EngineLoop:
    """A decoder at work; belongs to the main thread of its process.

    Attributes:
        memory: What rows and prefixes may take.
    """

    def __init__(
        self,
        model: RunnableModel,
        fresh_caches: CacheFactory,
        resources: Resources,
        tuning: TuningOptions,
        port: Port,
    ) -> None:
        """Start idle.

        Args:
            model: A model that belongs to this thread.
            fresh_caches: Creates its caches; their plan may change, see `Adoption`.
        """
        self.model, self.resources, self._port = model, resources, port
        plan, limits, pass_s = fresh_caches.plan, tuning.scheduling, DEVICE.pass_limit_s
        self.prefixes, self.counters = resources.prefixes, Counters()
        most = limits.max_slots if plan.batches else 1
        self.scheduler = Scheduler(max_slots=limits.max_slots, max_active=most)
        self.memory = Memory(resources.reservations, self.scheduler, self.prefixes)
        self._publisher = Publisher(self._hand_over, limits.max_replies_per_s)
        self.background = BackgroundJobs(limits.prefill_chunk, limits.side_share, pass_s)
        self._jobs = JobFactory(model, fresh_caches, self.prefixes, self.background)
        self._pacer = PrefillPacer.of(limits, pass_s)
        new_drafting = partial(make_drafting, model, plan, resources, tuning, self.counters)
        feeder, drafting = make_feeder(model.network, fresh_caches), new_drafting()
        self.prefilling = Prefilling(feeder, self.prefixes, self._pacer, plan, drafting)
        new_batch = partial(Batch, model.network, fresh_caches, model.card.vocab_size)
        self.batch = new_batch(drafting)
        self._threads = resources.threads
        if self._threads is not None:
            self.batch.note_step = self._threads.observe
        self._suspects = Suspects(self.scheduler, self.memory, self.batch, feeder, new_batch, port)
        self._suspects.chunk_size = lambda: self._pacer.size
        self._adoption = Adoption(plan, self, new_drafting)
        drafts = tuning.speculation.speculation != "off"
        self.examination = Examination(self, self._adoption, knows_drafts=drafts)
        self._commands: deque[Command] = deque()
        self._is_stopping, self._rests, self._has_ends = False, True, False
        self._turns, self.active_at, self._keeps_memory = 0, time.monotonic(), True
        self._stepped_at: float | None = None

    def run(self) -> None:
        """Run turns until told to stop."""
        while not self._is_stopping:
            self.turn()
        self.close()

    def turn(self) -> None:
        """Receive, compute and report; a request that makes the model fail fails alone."""
        timeout_s = self.idle_timeout_s if self._rests else None
        self._commands += self._port.receive(waits=self._rests, timeout_s=timeout_s)
        try:
            if self._commands:
                self._obey_all()
            pace = self._pace()
            self._compute(self._port.agree(pace) if self._port.is_shared else pace)
        except Exception as error:
            if self._port.is_shared:
                raise
            self._recover(error)
        was_at_work, self._rests = not self._rests, self.is_idle
        self._port.report(self, is_idle=self._rests)
        if self._rests and was_at_work:
            # Nobody waits now. A breach is a loss of this process like any other.
            self.check()

    # Commands: none of them computes.

    def _obey_all(self) -> None:
        while self._commands:
            self._obey(self._commands.popleft())
        self._rests = self.is_idle

    def _obey(self, command: Command) -> None:
        match command:
            case Submit():
                self.submit(command.request, command.generated, command.losses)
            case Cancel(request_id):
                self.cancel(request_id)
            case Expect(request_id, is_again):
                self.prefixes.expect(request_id, is_again=is_again)
            case Job(number, request):
                self.begin_job(number, request)
            case Leave(number):
                self.background.drop(number)
            case Stop():
                self._is_stopping = True
            case _:
                self._note(command)

    def _note(self, news: Fetched | DiskChanged | Resize | Told) -> None:
        """Handle what another thread of this process has to say."""
        match news:
            case Fetched():
                self.take_in(news)
            case DiskChanged():
                self.memory.note_change()
                self._port.send_status(self)
            case Resize(_, budget_bytes, attainable_bytes):
                self.memory.resize(budget_bytes, attainable_bytes)
                if self.is_idle:
                    # Memory freed by the prompt cache is for other backends.
                    mx.clear_cache()
            case Told():
                self._port.hand_over(news)
            case _:
                assert_never(news)

    def submit(
        self, request: GenerationRequest, generated: Sequence[int] = (), losses: int = 0
    ) -> None:
        """Queue a request, or refuse it at once if its KV cache could never fit.

        Args:
            generated: Tokens of its reply drawn earlier: the row continues after them.
            losses: Engines lost over it since.
        """
        row = Row.resumed(request, generated, losses)
        try:
            self.memory.reservations.require_fit(row)
        except OverloadedError as error:
            self._publisher.put(row.request_id, error, is_urgent=True)
            self._publisher.flush()
            return
        with self._suspects([row]):
            if self.prefixes.fetch(row):
                self.scheduler.await_fetch(row)
            else:
                self.scheduler.enqueue(row)

    def begin_job(self, number: int, request: SessionRequest | PrepareMedium) -> None:
        """Queue a computation to run between steps, or answer at once if none is needed."""
        if isinstance(request, PrepareMedium):
            raise AssertionError("media are prepared on a thread of their own")
        if isinstance(request, ListingRequest):
            self._port.answer([(number, self.prefixes.listing(request))])
        else:
            self.background.add(number, self._jobs.make(number, request))
            self._rests = False

    def take_in(self, fetched: Fetched) -> None:
        """Resume a request that waited for the disk."""
        self.prefixes.take_in(fetched)
        if row := self.scheduler.find(fetched.request_id):
            self.scheduler.end_fetch(row)

    def cancel(self, request_id: str) -> None:
        """Drop a request and free its slot; no effect if it has ended or was never known."""
        if row := self.scheduler.find(request_id):
            row.finish()
            self._forget(row)

    # The work of a turn.

    def _pace(self) -> Pace | None:
        """Return the work that this rank's clock allows; `None` if the turn needs no clock."""
        scheduler = self.scheduler
        if scheduler.waiting.count or scheduler.prefilling or self.background.jobs:
            if self._stepped_at is not None:
                self._pacer.begin_pause(self._stepped_at)
                self._stepped_at = None
            return Pace(self._pacer.pace(), self.background.pace())
        return None

    def _compute(self, pace: Pace | None) -> None:
        """Admit, then run one prefill chunk or one decode step, and a piece of other work."""
        rested_s = time.monotonic() - self.active_at if self._rests else 0.0
        if self.examination.is_pending or self._adoption.is_due:
            self.examination.begin_if_due(rested_s)
        has_waiting = bool(self.scheduler.waiting.count or self.scheduler.fetching)
        if not self._rests or has_waiting or self.examination.is_running:
            if has_waiting:
                self._admit()
            if self._suspects.waiting:
                self._suspects.try_next()
            else:
                self._advance(pace)
            if self.examination.is_running and self.examination.may_advance:
                self._examine()
            self._clear_up()
            self._hurry()
            if self.memory.has_changed:
                self.memory.relieve()
            self.active_at, self._keeps_memory = time.monotonic(), True
        elif rested_s >= IDLE_TIMEOUT_S:
            self.prefixes.rest()
            self._release()
        if has_waiting and self.memory.is_starved:
            self._refuse_overdue()
        if self.background.ended:
            self._answer_ended()

    def _release(self) -> None:
        """Return the memory that ended work has freed to the system, once per rest."""
        if self._keeps_memory:
            self._keeps_memory = False
            mx.clear_cache()
            trim()

    def _admit(self) -> None:
        """Give slots to waiting rows, and let rows whose prompt is computed join the batch."""
        now = time.monotonic()
        for row in list(self.scheduler.fetching):
            if now > row.submitted_at + FETCH_LIMIT_S:
                log.warning("request id=%s no longer waits for the disk", row.request_id)
                self.scheduler.end_fetch(row)
        self.memory.admit()

    def _advance(self, pace: Pace | None) -> None:
        """Run a chunk, unless there is none or decoding rows have waited long enough."""
        scheduler = self.scheduler
        if scheduler.prefilling:
            self._join()
        row = scheduler.next_prefill() if pace else None
        has_room = pace is None or pace.prefill.has_room or not scheduler.active
        if row is not None and pace is not None and has_room:
            self._deliver()
            self._prefill(row, pace)
        elif not self.batch.is_empty:
            self._decode()
            self._stepped_at = time.monotonic()
        if pace is not None and (row is None or has_room):
            # Otherwise the new pause is for the waiting prompt.
            self._compute_background(pace)

    def _join(self) -> None:
        """Let rows whose prompt is computed join the batch."""
        for row in self.scheduler.activate():
            self.batch.add(row)
            if row.drawn == 0:
                self._publisher.put(row.request_id, row.prefill_done(time.monotonic()))

    def _prefill(self, row: Row, pace: Pace) -> None:
        limit = pace.prefill.shared if self.scheduler.active else pace.prefill.alone
        limit = limit.cut(row.losses)
        together = self.prefilling.takes_several
        companions = self.scheduler.companions(row) if together else []
        with self._suspects([row, *companions]):
            rows = self.prefilling.choose(row, companions, limit)
        if rows:
            with self._suspects(rows):
                self.counters.add("prompt_tokens", self.prefilling.feed(rows, limit))
        self.memory.note_change()

    def _decode(self) -> None:
        """Compute a step, and publish the tokens of the previous one."""
        if self._threads is not None and self._threads.wants_change:
            self._deliver()
            self._threads.change()
        # A first token would wait for the second.
        if DEVICE.blocks_dispatch and self.batch.awaits_first_token:
            self._deliver()
        self.memory.before_step()
        active = self.scheduler.active
        with self._suspects(list(active)):
            for steps in self.batch.step():
                if steps:
                    self._publish(steps)
                else:
                    # The device computes: the server may read what is due.
                    self._publisher.settle(len(active))
            # A last token must not wait for the copy into the prompt cache.
            self._hurry()
            for row, problem in self.batch.astray():
                self._fail(row, GrammarError(f"cannot be followed any further: {problem}"))
            for row in self.batch.departed():
                self._store_caches(row)
                self.memory.put_back(row)
        if len(active) > 1:
            self._suspects.acquit()

    def _compute_background(self, pace: Pace) -> None:
        """Run a piece of background work, if there is any and the rows have had their share."""
        is_alone = self.scheduler.is_idle
        if self.background.jobs and (is_alone or pace.background.has_rested):
            self._deliver()
            self._suspects.note_job()
            self.background.advance(pace.background, is_alone=is_alone)

    def _clear_up(self) -> None:
        """Give back MLX's free buffers now and then."""
        self._turns += 1
        if self._turns % DEVICE.turns_per_clear == 0:
            # With work in flight MLX would hold the GIL until it is done.
            self._land()
            mx.clear_cache()

    def _examine(self) -> None:
        """Compute a pass of the trials that are open."""
        self._deliver()
        self._suspects.note_job()
        self.examination.advance()

    # Delivery.

    def _hurry(self) -> None:
        """Send all events if one of them is urgent."""
        if self._publisher.is_urgent:
            self._publisher.flush()

    def _deliver(self) -> None:
        """Publish the tokens in flight at once, before anything else is computed."""
        self._land()
        self._publisher.flush()

    def _land(self) -> None:
        """Read the tokens in flight."""
        with self._suspects(list(self.scheduler.active)):
            self._publish(self.batch.land())

    def _publish(self, steps: Sequence[RowStep]) -> None:
        """Publish tokens that have landed, and release the rows that have ended."""
        firsts = []
        for row, step in steps:
            if is_first := len(row.token_ids) == row.prompt_tokens + 1:
                firsts.append(row)
            self._publisher.put(row.request_id, step, is_urgent=is_first or row.has_left)
            self.counters.count(step.token_id)
        # Last, so that a failure here costs no token.
        for row in firsts:
            self.prefixes.record(row)
        for row, _ in steps:
            if row.has_left:
                self._forget(row)

    def _hand_over(self, told: Told) -> None:
        """Send events, after a status that includes the ends of requests."""
        if self._has_ends:
            self._has_ends = False
            self._port.send_status(self)
        self._port.hand_over(told)

    def _answer_ended(self) -> None:
        """Send the results of jobs, after a status that knows which have ended."""
        ended = self.background.take_ended()
        self._port.send_status(self)
        self._port.answer(ended)

    # The end of a request.

    def _forget(self, row: Row) -> None:
        """Remove a row that has ended or whose caller has left."""
        self._has_ends = True
        self._suspects.forget(row)
        self.scheduler.remove(row)
        # First, to make room for the row's tokens in the prompt cache.
        self.memory.release(row)
        self._store_caches(row)

    def _store_caches(self, row: Row) -> None:
        """Store a row's computed tokens in the prompt cache, and drop its own caches."""
        self.prefixes.leave(row)
        row.release()

    def _fail(self, row: Row, error: BackendError) -> None:
        # A failed pass may have left anything in the caches.
        row.release()
        self._publisher.put(row.request_id, error, is_urgent=True)
        row.finish()
        self._forget(row)

    def _refuse_overdue(self) -> None:
        for row in self.memory.overdue(MEMORY_WAIT_S):
            problem = (
                f"other backends of this machine hold the memory for its KV cache, and gave none "
                f"within {MEMORY_WAIT_S:.0f} s"
            )
            self._fail(row, OverloadedError(problem))
        self._hurry()

    def _recover(self, error: Exception) -> None:
        """Fail only the request or computation that made the turn fail.

        Raises:
            DeviceLostError: A fresh trial fails too: no request is to blame.
        """
        try:
            try_device(self.model.network)
        except Exception as failure:  # noqa: BLE001 (upstream raises anything)
            raise DeviceLostError(f"{error}; then a trial prompt failed: {failure}") from error
        if self.examination.blame(error):
            return
        for row in self.scheduler.rows():
            if row.has_left:
                self._forget(row)
        self._hurry()
        if not self.background.blame(error) and (guilty := self._suspects.accuse(error)):
            log.error("request id=%s failed", guilty.request_id, exc_info=error)
            problem = GenerationFailedError(f"the model failed on this request: {error}")
            self._fail(guilty, problem)
            self._publisher.flush()
        self.memory.relieve()
        if self.background.ended:
            self._answer_ended()

    # What others may ask.

    @property
    def is_idle(self) -> bool:
        """Whether a turn would have nothing to compute."""
        if self.scheduler.active:
            return False
        has_rows = not self.scheduler.is_idle and not self.memory.is_starved
        is_busy = has_rows or not self.batch.is_empty or not self.background.is_idle
        return not (is_busy or self._commands or self.examination.wants_turns)

    @property
    def idle_timeout_s(self) -> float | None:
        """How long an idle loop may be left without a turn; `None` is forever."""
        if self.examination.is_pending:
            return DELAY_S
        waits = self.scheduler.waiting_count or self.prefixes.wants_rest or self._keeps_memory
        return IDLE_TIMEOUT_S if waits else None

    @property
    def checksum(self) -> int:
        """The checksum of all tokens drawn so far, in order."""
        return self.counters.checksum

    @property
    def card(self) -> ModelCard:
        """The facts about the model, including those found from its caches."""
        return replace(self.model.card, reuse=self.prefixes.reuse)

    def status(self) -> EngineStatus:
        """Return a snapshot."""
        return take_snapshot(self)

    def check(self) -> None:
        """Raise AssertionError unless the parts agree with each other."""
        self.scheduler.check()
        self.prefixes.check()
        self.memory.check()

    def close(self) -> None:
        """Write pending nodes to disk."""
        self.examination.leave()
        self.prefixes.close()
