"""Keeps one engine process at work on a model, and replaces a lost one.

The open calls resume in the next process with the same tokens: a draw depends only on seed and
position. Their callers see a pause. A turn that takes too long is reported.
"""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from backend.config import ModelOptions
from backend.core.engine_status import EngineState, EngineStatus, ProcessStatus, Restart
from backend.core.metric_table import added, counters_of
from backend.core.model import ModelCard
from backend.engine.findings import FindingsStore
from backend.engine.messages.protocol import (
    Answered,
    Compiling,
    Found,
    Load,
    Loaded,
    News,
    Passing,
    Snapshot,
    Told,
)
from backend.engine.supervision.engine_process import EngineProcess, Starter, ended_on_failure
from backend.engine.supervision.open_calls import OpenCalls
from backend.errors import BackendError, EngineFailedError, EngineStuckError, LoadFailedError
from common.machine_memory import resident_bytes
from common.process import in_own_thread

LOOKS_PER_LIMIT = 24

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class TurnWatch:
    """Checks an engine regularly, once `look` was called, until it ends; on an event loop.

    Attributes:
        turn_s: Duration of the present turn; 0 between turns.
        limit_s: A longer turn is too long, in seconds.
        lost_after_s: After a longer turn the engine is given up; 0 is never.
        give_up: Called with the duration of the turn.
    """

    turn_s: Callable[[], float]
    is_alive: Callable[[], bool]
    limit_s: float
    lost_after_s: float = 0.0
    give_up: Callable[[float], None] = lambda _: None
    _told_s: float = 0.0

    def look(self) -> None:
        """Log a turn that is too long, and again whenever it has doubled; check again later."""
        if not self.is_alive():
            return
        turn_s = self.turn_s()
        self._judge(turn_s)
        if self.lost_after_s and turn_s >= self.lost_after_s:
            self.give_up(turn_s)
            return
        limit_s = min(self.limit_s, self.lost_after_s or self.limit_s)
        asyncio.get_running_loop().call_later(limit_s / LOOKS_PER_LIMIT, self.look)

    def _judge(self, turn_s: float) -> None:
        if turn_s < self._told_s:
            log.warning("the engine goes on, after more than %.0f s in one turn", self._told_s)
            self._told_s = 0.0
        if turn_s >= max(self.limit_s, 2 * self._told_s):
            log.error("the engine has been in one turn for %.0f s: it may be stuck", turn_s)
            self._told_s = turn_s


MAX_FAILED_STARTS = 3
# A process lost this early, without any message, counts as a failed start.
_EARLY_S = 2.0
_STOP_TIMEOUT_S = 3.0
_WRITE_TIMEOUT_S = 1.0
_KEPT_RESTARTS = 16
# The server's text side, and open requests, were made for these.
_LASTING = ("model_type", "vocab_size", "eos_token_ids", "context_length")


class Losses:
    """The counts of the lost processes of a model, and the restarts, since its load."""

    def __init__(self) -> None:
        self._lost = added([])
        self._restarts: deque[Restart] = deque(maxlen=_KEPT_RESTARTS)

    def count(self, lost: EngineStatus) -> None:
        """Keep the counts of a lost process."""
        self._lost = added([self._lost, counters_of(lost.metrics)])

    def note_restart(self, reason: BaseException, lost_s: float) -> None:
        """Record that another process has the model, and the time that took."""
        self._lost = added([self._lost, {"restarts": 1, "lost_s": lost_s}])
        self._restarts.append(Restart(reason=str(reason), lost_s=lost_s))

    def added_to(self, status: EngineStatus) -> EngineStatus:
        """Return the status of the present process with the counts of all of them."""
        return replace(
            status,
            metrics=added([status.metrics, self._lost]),
            latest_restarts=tuple(self._restarts),
        )


class Supervisor:
    """Supervises engine processes; lives on one event loop.

    Attributes:
        calls: The open calls, and the process that has the model.
        starter: Starts processes.
    """

    def __init__(
        self,
        note_fault: Callable[[BackendError], None],
        long_turn_s: float,
        environment: Mapping[str, str] | None,
        memory_ledger: Path | None = None,
        findings: FindingsStore | None = None,
    ) -> None:
        """Start without a process.

        Args:
            note_fault: Called when no process can load the model any more.
            environment: Of the processes; `None` is this process's.
            memory_ledger: The directory where they share the machine's memory with others.
            findings: Keeps their findings; `None` keeps these as long as this object.
        """
        self.calls = OpenCalls()
        self.starter = Starter(self._hear, self._note_end, environment)
        self._memory_ledger = memory_ledger
        self._findings = findings or FindingsStore()
        self._writing: set[asyncio.Task[None]] = set()
        self._note_fault = note_fault
        self._long_turn_s = long_turn_s
        self._recovery: asyncio.Task[None] | None = None
        self._next: EngineProcess | None = None
        self._status = EngineStatus()
        self._passing: Passing | None = None
        self._compiling: Collection[str] = ()
        self._failed_starts = 0
        self._card: ModelCard | None = None
        self._loaded_at = 0.0
        self._has_told = False
        self._losses = Losses()

    @property
    def is_serving(self) -> bool:
        """Whether work is accepted: a process has the model, or the next one will."""
        return self.calls.process is not None or self._recovery is not None

    @property
    def process_id(self) -> int | None:
        """The id of the process with the model."""
        process = self.calls.process
        return process.process_id if process else None

    async def look(self, options: ModelOptions, directory: Path) -> None:
        """Have another process look at a model; fails as `EngineProcess.load`."""
        self._findings.forgive()
        self._next = await self._looked(Load(options, directory, self._memory_ledger))

    async def load(self) -> Loaded:
        """Have the process that has looked at a model load it, once the present one has ended."""
        self._losses, self._failed_starts = Losses(), 0
        process, self._next = self._next, None
        if process is None:
            raise LoadFailedError("no process has looked at the model")
        loaded = await _loaded(process)
        self._install(process, loaded)
        return loaded

    async def drop_next(self) -> None:
        """End the process that has looked at a model, if it has not loaded it."""
        process, self._next = self._next, None
        if process is not None:
            await process.end()

    async def end(self, reason: BackendError, *, drops_spare: bool = False) -> None:
        """End the process and all open calls, after writing pending nodes to disk."""
        process = self.calls.pause()
        recovery, self._recovery = self._recovery, None
        self._status = EngineStatus()
        self.calls.fail_all(reason)
        if recovery is not None:
            recovery.cancel()
            await asyncio.wait([recovery])
        if process is not None:
            await process.end(_STOP_TIMEOUT_S)
        if self._writing:
            await asyncio.wait(self._writing, timeout=_WRITE_TIMEOUT_S)
        if drops_spare:
            await self.starter.drop_spare()

    def status(self) -> EngineStatus:
        """Return the latest snapshot, with the duration of the present turn; from any thread."""
        process, status = self.calls.process, self._status
        if process is None:
            return self._losses.added_to(EngineStatus(state=EngineState.BUSY))
        turn_s = self._turn_s(process)
        state = EngineState.ERROR if turn_s >= self._long_turn_s else status.state
        metrics = {**status.metrics, "turn_s": turn_s}
        return self._losses.added_to(replace(status, state=state, metrics=metrics))

    def processes(self) -> tuple[ProcessStatus, ...]:
        """Return the processes of the backend."""
        numbers = {"server": os.getpid(), "engine": self.process_id}
        return tuple(
            ProcessStatus(role=role, process_id=number, resident_bytes=resident_bytes(number))
            for role, number in numbers.items()
            if number is not None
        )

    def _turn_s(self, process: EngineProcess) -> float:
        """Return how long a process with work has been silent."""
        return time.monotonic() - process.silent_since if self.calls.awaits_turn else 0.0

    def _install(self, process: EngineProcess, loaded: Loaded) -> None:
        self._status, self._card = loaded.status, loaded.card
        self._passing, self._compiling = None, ()
        self._loaded_at = time.monotonic()
        self._has_told = False
        self.calls.begin(process)
        TurnWatch(
            lambda: self._turn_s(process),
            lambda: self.calls.process is process,
            self._long_turn_s,
            lost_after_s=process.order.options.tuning.process.engine_timeout_s,
            give_up=lambda turn_s: self._lose(
                process, EngineStuckError(f"no turn has ended for {turn_s:.0f} s")
            ),
        ).look()

    def _hear(self, process: EngineProcess, news: News) -> None:
        if process is not self.calls.process:
            # One that is loading has found something all the same.
            if isinstance(news, Found):
                self._note_found(news)
            return
        match news:
            case Told():
                self._has_told = True
                self.calls.note(news)
            case Answered(number, result):
                self._has_told = True
                self.calls.note_result(number, result)
            case Passing():
                self._passing = news
            case Compiling(requests):
                self._compiling = requests
            case Snapshot(status):
                self._status = status
            case Found():
                self._note_found(news)

    def _note_end(self, process: EngineProcess, reason: BackendError) -> None:
        if process is self.calls.process:
            self._lose(process, reason)

    def _lose(self, process: EngineProcess, reason: BackendError) -> None:
        """Replace the process, which is gone or useless."""
        self.calls.pause()
        culprits = self.calls.note_loss(self._passing, self._compiling, reason)
        self._losses.count(self._status)
        self._status = EngineStatus()
        is_early = not self._has_told and time.monotonic() < self._loaded_at + _EARLY_S
        self._failed_starts = self._failed_starts + 1 if is_early and not culprits else 0
        log.warning(
            "the engine is lost: %s; %d open requests go on in another%s",
            reason,
            sum(1 for _ in self.calls),
            f", {len(culprits)} failed because it was lost over them twice" if culprits else "",
        )
        self._recovery = asyncio.create_task(self._recover(process, reason))
        self._recovery.add_done_callback(self._note_recovery)

    async def _recover(self, lost: EngineProcess, reason: BackendError) -> None:
        """Have another process load the model; give up after three failures."""
        began_at = time.monotonic()
        # The next one needs its memory.
        await lost.end()
        while self._failed_starts < MAX_FAILED_STARTS:
            try:
                process, loaded = await self._reloaded(lost.order)
            except BackendError as error:
                self._failed_starts += 1
                reason = error
                log.warning("another engine cannot load the model: %s", error)
                continue
            took_s = time.monotonic() - began_at
            self._losses.note_restart(reason, took_s)
            log.warning("another engine has loaded the model after %.1f s", took_s)
            self._install(process, loaded)
            return
        raise EngineFailedError(f"{MAX_FAILED_STARTS} in a row could not be started: {reason}")

    async def _reloaded(self, order: Load) -> tuple[EngineProcess, Loaded]:
        limit_s = order.options.tuning.process.reload_timeout_s
        try:
            async with asyncio.timeout(limit_s or None):
                process = await self._looked(order)
                loaded = await _loaded(process)
        except TimeoutError:
            raise LoadFailedError(f"it was not loaded within {limit_s} s") from None
        if any(getattr(loaded.card, name) != getattr(self._card, name) for name in _LASTING):
            await process.end()
            raise LoadFailedError(f"{order.directory} holds another model than before")
        return process, loaded

    async def _looked(self, order: Load) -> EngineProcess:
        """Have a process look at a model, and know all that is known of it."""
        known = await in_own_thread(self._findings.known)
        return await self.starter.looked(structs.replace(order, known=known))

    def _note_found(self, found: Found) -> None:
        """Keep the findings of a process."""
        self._findings.note(found.key, found.findings)
        if not found.findings.begun:
            writing = asyncio.create_task(in_own_thread(self._findings.write))
            self._writing.add(writing)
            writing.add_done_callback(self._writing.discard)

    def _note_recovery(self, recovery: "asyncio.Task[None]") -> None:
        """End all open calls when a recovery has failed, for any reason."""
        if recovery is not self._recovery:
            return
        self._recovery = None
        error = None if recovery.cancelled() else recovery.exception()
        if error is None:
            return
        if not isinstance(error, EngineFailedError):
            log.error("replacing the engine has failed", exc_info=error)
            error = EngineFailedError(f"it could not be replaced: {error}")
        log.critical("%s", error)
        self.calls.fail_all(error)
        self._note_fault(error)


async def _loaded(process: EngineProcess) -> Loaded:
    async with ended_on_failure(process):
        return await process.load()
