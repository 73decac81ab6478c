"""A loaded decoder at work: commands in, turns that advance its requests, events out."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

import mlx.core as mx

from backend.config import MEMORY_WAIT_S
from backend.core.model import ModelCard
from backend.core.prompt_cache import ListingRequest
from backend.core.request import GenerationRequest
from backend.core.status import EngineStatus
from backend.engine.messages.commands import (
    Answer,
    Cancel,
    Compute,
    Expect,
    Fetched,
    Resize,
    Submit,
)
from backend.engine.rows.row import Row
from backend.engine.session.decoder_parts import DecoderParts
from backend.engine.session.examination import DELAY_S
from backend.engine.session.pace import Pace
from backend.engine.session.session import Outlets, SessionCommand
from backend.engine.session.status import take_snapshot
from backend.engine.session.turns import Turns
from backend.errors import OverloadedError
from backend.model.loaded import RunnableModel

IDLE_TIMEOUT_S = 1.0


class DecoderSession:
    """The `Session` of a model that generates."""

    def __init__(self, model: RunnableModel, parts: DecoderParts, outlets: Outlets) -> None:
        """Start idle.

        Args:
            model: A model that belongs to this thread.
            parts: The parts of its session.
            outlets: Receive the results.
        """
        self.model = model
        self._answer = outlets.answer
        self._parts = parts
        self._turns = Turns(self._parts)
        self._active_at = time.monotonic()
        self._order: Resize | None = None

    @property
    def is_idle(self) -> bool:
        """Whether a turn would have nothing to compute."""
        parts = self._parts
        has_no_rows = parts.scheduler.is_idle or parts.memory.is_starved
        has_nothing_else = parts.background.is_idle and not self._examines
        return has_no_rows and parts.batch.is_empty and has_nothing_else

    @property
    def _examines(self) -> bool:
        """Whether trials are due between requests: not before the first one has its reply."""
        examination = self._parts.examination
        is_due = examination.is_pending and self._parts.counters.values["generated_tokens"] > 0
        return examination.is_running or is_due

    @property
    def idle_timeout_s(self) -> float | None:
        """How long an idle session may be left without a turn; `None` is forever."""
        if self._parts.examination.is_pending:
            return DELAY_S
        waits = self._parts.scheduler.waiting_count or self._parts.prefixes.wants_rest
        return IDLE_TIMEOUT_S if waits else None

    @property
    def checksum(self) -> int:
        """The checksum of all tokens drawn so far, in order."""
        return self._parts.counters.checksum

    @property
    def card(self) -> ModelCard:
        """The facts about the model, including those found from its caches."""
        return replace(self.model.card, reuse=self._parts.prefixes.reuse)

    def obey(self, command: SessionCommand) -> None:
        """Handle a command by queueing, dropping or answering; computes nothing."""
        match command:
            case Submit(request, generated):
                self.submit(request, generated)
            case Cancel(request_id):
                self.cancel(request_id)
            case Expect(request_id, is_again):
                self._parts.prefixes.expect(request_id, is_again=is_again)
            case Compute():
                self.compute(command)
            case Fetched():
                self.take_in(command)
            case Resize():
                self._order = command
            case _:
                assert_never(command)

    def submit(self, request: GenerationRequest, generated: Sequence[int] = ()) -> None:
        """Queue a request, or refuse it at once if its KV cache could never fit.

        Args:
            request: A request with a new id.
            generated: Tokens of its reply drawn earlier: the row continues after them.
        """
        parts, row = self._parts, Row.resumed(request, generated)
        try:
            parts.memory.require_fit(row)
        except OverloadedError as error:
            parts.publisher.put(row.request_id, error, is_urgent=True)
            parts.publisher.flush()
            return
        parts.requests.add(row)
        parts.recovery.rows = (row,)
        if parts.prefixes.fetch(row):
            parts.scheduler.await_fetch(row)
        else:
            parts.scheduler.enqueue(row)
        parts.recovery.rows = ()

    def compute(self, command: Compute) -> None:
        """Queue a computation to run between steps, or answer at once if none is needed."""
        parts, reply = self._parts, command.reply
        if isinstance(command.request, ListingRequest):
            self._answer([Answer(reply, parts.prefixes.listing(command.request))])
        else:
            parts.background.add(parts.job_factory.make(command.request, reply), reply)

    def take_in(self, fetched: Fetched) -> None:
        """Resume a request that waited for the disk."""
        self._parts.prefixes.take_in(fetched)
        if row := self._parts.requests.get(fetched.request_id):
            self._parts.scheduler.end_fetch(row)

    def cancel(self, request_id: str) -> None:
        """Drop a request and free its slot; no effect if it has ended or was never known."""
        if row := self._parts.requests.get(request_id):
            self._parts.requests.drop(row)

    def close(self) -> None:
        """Write pending nodes to disk."""
        self._parts.examination.leave()
        self._parts.prefixes.close()

    def pace(self) -> Pace:
        """Return the work that the clock allows in the next turn."""
        return self._turns.pace()

    def turn(self, pace: Pace | None = None) -> None:
        """Advance the requests by one piece of work; write to disk after a while without any.

        Args:
            pace: The work that the clock allows; `None` reads the clock.
        """
        self._resize()
        self._begin_examination()
        if not self.is_idle or self._parts.scheduler.waiting_count:
            self._turns.run(pace or self.pace())
            self._active_at = time.monotonic()
        elif time.monotonic() - self._active_at >= IDLE_TIMEOUT_S:
            self._parts.prefixes.rest()
        self._refuse_overdue()
        self._answer_ended()

    def recover(self, error: Exception) -> None:
        """Fail only the request or computation that made the last turn fail."""
        parts = self._parts
        rows = parts.recovery.take_rows()
        if parts.examination.blame(error):
            return
        parts.requests.forget_ended(parts.requests.all())
        parts.publisher.hurry()
        if not parts.background.blame(error):
            parts.recovery.blame(rows, error)
        parts.memory.relieve()
        self._answer_ended()

    def status(self) -> EngineStatus:
        """Return a snapshot."""
        return take_snapshot(self._parts, self.model.card.weights_bytes)

    def check(self) -> None:
        """Raise AssertionError unless the parts agree with each other."""
        self._parts.scheduler.check()
        self._parts.prefixes.check()
        self._parts.memory.check()
        self._parts.requests.check()

    def _resize(self) -> None:
        """Apply the latest budget left by other backends."""
        order, self._order = self._order, None
        if order is None:
            return
        self._parts.memory.resize(order.budget_bytes, order.attainable_bytes)
        if self.is_idle:
            # Memory freed by the prompt cache is for other backends.
            mx.clear_cache()

    def _begin_examination(self) -> None:
        """Begin with the trials that are open after a request, or when others wait for them.

        What they found about stored prefixes may be due as well.
        """
        parts = self._parts
        if not parts.background.has_begun:
            parts.adoption.refer()
        if not parts.examination.is_pending:
            return
        is_over = parts.scheduler.is_idle and self._examines
        has_rested = self.is_idle and time.monotonic() - self._active_at >= DELAY_S
        if is_over or has_rested or (parts.scheduler.slots_taken and parts.scheduler.waiting):
            parts.examination.begin()

    def _refuse_overdue(self) -> None:
        for row in self._parts.memory.overdue(MEMORY_WAIT_S):
            problem = (
                f"other backends of this machine hold the memory for its KV cache, and gave none "
                f"within {MEMORY_WAIT_S:.0f} s"
            )
            self._parts.requests.fail(row, OverloadedError(problem))
        self._parts.publisher.hurry()

    def _answer_ended(self) -> None:
        if ended := self._parts.background.take_ended():
            self._answer(ended)
