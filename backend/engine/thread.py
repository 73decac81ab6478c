"""The thread of an engine: carries out commands, and tells its event loop when it has died."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias, TypeVar

from backend.core.status import EngineState, EngineStatus
from backend.engine.command import Command, Stop
from backend.engine.publisher import HandOver
from backend.engine.stream import Publication
from backend.engine.turn_watch import TurnWatch
from backend.errors import BackendError, EngineFailedError, LoadFailedError
from backend.model.upstream import import_mlx_lm

JOIN_TIMEOUT_S = 3.0

Commands: TypeAlias = "queue.SimpleQueue[Command]"
Given = TypeVar("Given")

log = logging.getLogger(__name__)


class Worker(Protocol):
    """What a thread runs."""

    @property
    def status(self) -> EngineStatus:
        """The latest snapshot; any thread may read it."""

    @property
    def turn_s(self) -> float:
        """How long the present turn has taken; 0 between turns. Any thread may read it."""

    def run(self) -> None:
        """Work until told to stop; whatever is raised ends the thread."""


MakeWorker: TypeAlias = Callable[[Commands, HandOver], Worker]


def make_worker(commands: Commands, publish: HandOver) -> Worker:
    """Import MLX, and return what carries out commands with it.

    Raises:
        LoadFailedError: MLX cannot be imported.
    """
    try:
        import_mlx_lm()
        from backend.engine.worker import EngineWorker
    except ImportError as error:
        raise LoadFailedError(f"MLX cannot be imported: {error}") from error
    return EngineWorker(commands, publish)


class EngineThread:
    """One thread, from its start to its end; belongs to an event loop."""

    def __init__(
        self,
        make_worker: MakeWorker,
        deliver: Callable[[Sequence[Publication]], None],
        note_death: Callable[[BackendError], None],
        long_turn_s: float,
    ) -> None:
        """Start the thread.

        Args:
            make_worker: Called on the thread.
            deliver: Takes the events of a turn; called on the event loop.
            note_death: Takes why the thread has ended without being told to; called on the
                event loop, behind the last events.
            long_turn_s: A turn that takes longer is reported.

        Raises:
            EngineFailedError: The system has no thread to give.
        """
        self._make_worker = make_worker
        self._deliver = deliver
        self._note_death = note_death
        self._commands: Commands = queue.SimpleQueue()
        self._worker: Worker | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise EngineFailedError(str(error)) from error
        self._long_turn_s = long_turn_s
        TurnWatch(lambda: self._turn_s, lambda: self.is_alive, long_turn_s).look()

    @property
    def is_alive(self) -> bool:
        """Whether the thread has yet to end."""
        return self._thread.is_alive()

    @property
    def status(self) -> EngineStatus:
        """The latest snapshot of the worker."""
        return self._worker.status if self._worker is not None else EngineStatus()

    @property
    def report(self) -> EngineStatus:
        """The snapshot, and the turn that it is waiting for; `ERROR` if that takes too long."""
        status = replace(self.status, turn_s=self._turn_s)
        is_long = status.turn_s >= self._long_turn_s
        return replace(status, state=EngineState.ERROR) if is_long else status

    def put(self, command: Command) -> None:
        """Queue a command; what a dead thread has not carried out is lost."""
        self._commands.put(command)

    async def stop(self) -> bool:
        """Tell the thread to stop; false when it does not within a few seconds."""
        self._commands.put(Stop())
        await asyncio.to_thread(self._thread.join, JOIN_TIMEOUT_S)
        return not self.is_alive

    @property
    def _turn_s(self) -> float:
        return self._worker.turn_s if self._worker is not None else 0.0

    def _run(self) -> None:
        try:
            self._worker = self._make_worker(self._commands, self._publish)
            self._worker.run()
        except BaseException as error:  # the top of the thread: models raise even SystemExit
            log.critical("the engine thread has died", exc_info=error)
            # Without the traceback, whose frames hold the weights.
            self._call(self._note_death, _reason(error))

    def _publish(self, publications: Sequence[Publication]) -> None:
        """Hand a turn's events to the event loop, with one wake-up; called on the thread."""
        self._call(self._deliver, publications)

    def _call(self, function: Callable[[Given], None], given: Given) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, given)


def _reason(error: BaseException) -> BackendError:
    if isinstance(error, LoadFailedError):
        return LoadFailedError(str(error))
    return EngineFailedError(f"{type(error).__name__}: {error}")
