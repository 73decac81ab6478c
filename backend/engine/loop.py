"""The loop of an engine process with a model that generates: one turn after another.

A turn receives commands, admits requests, computes one piece of prefill or one step of decoding
and possibly a piece of other work, delivers tokens, and reports. All ranks of a model run this
loop; they differ in their port. `docs/internals/architecture.md` tells the life of a turn.
"""

import logging
import time
from collections import deque
from functools import partial
from typing import assert_never

import mlx.core as mx

from backend.config import TuningOptions
from backend.core.engine_status import EngineStatus
from backend.core.prefix_listing import ListingRequest
from backend.engine.background.jobs import BackgroundJobs
from backend.engine.background.work import JobFactory, tokens_of
from backend.engine.examination import DELAY_S, Examination
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
from backend.engine.open_requests import OpenRequests
from backend.engine.parts import Resources, make_drafting, take_snapshot
from backend.engine.passes.batch import Batch, ignore_step
from backend.engine.passes.caches import CacheFactory, try_device
from backend.engine.passes.feeder import make_feeder
from backend.engine.port import Command, Pace, Port, Publisher
from backend.engine.prefilling import Prefilling
from backend.engine.rows.pacing import Counters, PrefillPacer
from backend.engine.rows.row import Row
from backend.engine.rows.scheduler import Scheduler
from backend.engine.suspects import Suspects
from backend.errors import (
    DeviceLostError,
    GenerationFailedError,
    GrammarError,
)
from backend.model.device import DEVICE
from backend.model.loaded import RunnableModel

IDLE_TIMEOUT_S = 1.0
LEAST_CLEARED_BYTES = 2**24

log = logging.getLogger(__name__)


class EngineLoop:
    """A decoder at work; belongs to the main thread of its process. Its parts are `LoopParts`."""

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
            fresh_caches: Creates its caches; their plan may change, see `Examination`.
        """
        self.model, self.resources, self._port = model, resources, port
        plan, limits, pass_s = fresh_caches.plan, tuning.scheduling, DEVICE.pass_limit_s
        prefixes = self.prefixes = resources.prefixes
        counters = self.counters = Counters()
        most = limits.max_slots if plan.batches else 1
        scheduler = self.scheduler = Scheduler(max_slots=limits.max_slots, max_active=most)
        memory = self.memory = Memory(resources.reservations, scheduler, prefixes)
        publisher = self._publisher = Publisher(self._hand_over, limits.max_replies_per_s)
        self.background = BackgroundJobs(limits.prefill_chunk, limits.side_share, pass_s)
        self._jobs = JobFactory(model, fresh_caches, prefixes, self.background)
        self._pacer = PrefillPacer.of(limits, pass_s)
        new_drafting = partial(make_drafting, model, plan, resources, tuning, counters)
        feeder, drafting = make_feeder(model.network, fresh_caches), new_drafting()
        prefilling = self.prefilling = Prefilling(feeder, prefixes, self._pacer, plan, memory)
        prefilling.begin_drafts(drafting)
        new_batch = partial(Batch, model.network, fresh_caches, model.card.vocab_size)
        threads = self._threads = resources.threads
        batch = self.batch = new_batch(drafting, threads.observe if threads else ignore_step)
        suspects = self._suspects = Suspects(scheduler, memory, batch, prefilling, new_batch, port)
        self.requests = OpenRequests(scheduler, memory, prefixes, suspects, publisher, counters)
        self.examination = Examination(self, plan, new_drafting, tuning.speculation)
        self._commands: deque[Command] = deque()
        self._is_stopping, self._rests = False, True
        self._turns, self.active_at = 0, time.monotonic()
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
                self.requests.submit(command.request, command.generated, command.losses)
            case Cancel(request_id):
                self.requests.cancel(request_id)
            case Expect(request_id, is_again):
                self.prefixes.expect(request_id, is_again=is_again)
            case Job(number, request):
                self.begin_job(number, request)
            case Leave(number):
                self.background.drop(number)
            case Stop():
                self._is_stopping = True
            # Of other threads of this process.
            case Fetched():
                self.requests.take_in(command)
            case DiskChanged():
                self.memory.note_change()
                self._port.send_status(self)
            case Resize(_, budget_bytes, attainable_bytes):
                self.memory.resize(budget_bytes, attainable_bytes)
            case _:
                assert_never(command)

    def begin_job(self, number: int, request: SessionRequest | PrepareMedium) -> None:
        """Queue a computation to run between steps, or answer at once if none is needed."""
        if isinstance(request, PrepareMedium):
            raise AssertionError("media are prepared on a thread of their own")
        if isinstance(request, ListingRequest):
            self._port.answer([(number, self.prefixes.listing(request))])
        else:
            job = self._jobs.make(number, request)
            self.background.add(number, job, tokens_of(request))
            self._rests = False

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
        if self.examination.is_pending or self.examination.may_refer:
            self.examination.begin_if_due(rested_s)
        has_waiting = bool(self.scheduler.waiting.count or self.scheduler.fetching)
        if has_waiting:
            self.requests.admit()
        if not self._rests or has_waiting or self.examination.is_running:
            self._work(pace)
            self.active_at = time.monotonic()
        elif rested_s >= IDLE_TIMEOUT_S:
            self.prefixes.rest()
            self.memory.rest()
        if self.background.ended:
            self._answer_ended()

    def _work(self, pace: Pace | None) -> None:
        """Run the work of a turn, and settle the memory that it took."""
        if self._suspects.waiting:
            self._suspects.try_next()
        else:
            self._advance(pace)
        if self.examination.is_running and self.examination.may_advance:
            self._examine()
        self._clear_up()
        if self.memory.has_changed:
            self.memory.relieve()
        self.memory.note_work()

    def _advance(self, pace: Pace | None) -> None:
        """Run a chunk, unless there is none or decoding rows have waited long enough."""
        scheduler = self.scheduler
        if scheduler.prefilling:
            for joining in self.requests.activate():
                self.batch.add(joining)
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

    def _prefill(self, row: Row, pace: Pace) -> None:
        limit = pace.prefill.limit(row.losses, is_shared=bool(self.scheduler.active))
        if not self.requests.may_prefill(row):
            return
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
                self.requests.publish(steps)
            for row, problem in self.batch.astray():
                self.requests.fail(row, GrammarError(f"cannot be followed any further: {problem}"))
            for row in self.batch.departed():
                self.requests.store_caches(row)
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
        """Give back MLX's free buffers now and then, if they are worth a pause."""
        self._turns += 1
        is_due = self._turns % DEVICE.turns_per_clear == 0
        # Ranks pause together, whatever each of them holds.
        if is_due and (self._port.is_shared or mx.get_cache_memory() >= LEAST_CLEARED_BYTES):
            # With work in flight MLX would hold the GIL until it is done.
            self._land()
            mx.clear_cache()

    def _examine(self) -> None:
        """Compute a pass of the trials that are open."""
        self._deliver()
        self._suspects.note_job()
        self.examination.advance()

    # Delivery.

    def _deliver(self) -> None:
        """Publish the tokens in flight at once, before anything else is computed."""
        self._land()
        self._publisher.flush()

    def _land(self) -> None:
        """Read the tokens in flight."""
        with self._suspects(list(self.scheduler.active)):
            self.requests.publish(self.batch.land())

    def _hand_over(self, told: Told) -> None:
        """Send events, after a status that includes the ends of requests."""
        if self.requests.has_ended:
            self.requests.has_ended = False
            self._port.send_status(self)
        self._port.hand_over(told)

    def _answer_ended(self) -> None:
        """Send the results of jobs, after a status that knows which have ended."""
        ended = self.background.take_ended()
        self._port.send_status(self)
        self._port.answer(ended)

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
        self.requests.forget_ended()
        self._publisher.flush()
        if not self.background.blame(error) and (guilty := self._suspects.accuse(error)):
            log.error("request id=%s failed", guilty.request_id, exc_info=error)
            self.requests.fail(guilty, GenerationFailedError.of_model(error))
        self.memory.relieve()
        if self.background.ended:
            self._answer_ended()

    # Queries of other parts.

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
        waits = self.scheduler.waiting_count or self.prefixes.wants_rest or self.memory.wants_rest
        return IDLE_TIMEOUT_S if waits else None

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
