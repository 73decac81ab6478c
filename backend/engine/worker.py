"""The engine thread: commands in, turns of the session, events out.

Everything of MLX is made, read and freed here. What leaves are plain values.
"""

import contextlib
import gc
import logging
import queue
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import assert_never

import mlx.core as mx

from backend.core.request import GenerationRequest
from backend.core.status import EngineStatus
from backend.engine.assembly import Outlets, assemble_session
from backend.engine.command import (
    Cancel,
    Command,
    Embed,
    Fetched,
    Free,
    GroupNews,
    Judge,
    Load,
    Score,
    SideCommand,
    Stop,
    Submit,
    answer,
)
from backend.engine.distributed.group import GroupPlan, GroupSession, form_group
from backend.engine.distributed.topology import topology_of
from backend.engine.encoder_session import EncoderSession
from backend.engine.publisher import HandOver
from backend.engine.session import Session
from backend.engine.stream import Publication, is_last
from backend.errors import (
    BackendError,
    LoadCancelledError,
    LoadFailedError,
    ModelNotLoadedError,
    RequestCancelledError,
    ShuttingDownError,
)
from backend.model.loaded import LoadedModel
from backend.model.loader import load

STATUS_INTERVAL_S = 0.25

log = logging.getLogger(__name__)


class EngineWorker:
    """The loop of the engine thread.

    Attributes:
        status: The latest snapshot; replaced as a whole, so any thread may read it. Whoever has
            the last event of a request no longer finds the request in it.
    """

    def __init__(
        self,
        commands: "queue.SimpleQueue[Command]",
        publish: HandOver,
    ) -> None:
        """Prepare the loop.

        Args:
            commands: What to do, from any thread.
            publish: Takes events; called on the engine thread, must not block.
        """
        self._commands = commands
        self._publish = publish
        self._session: Session | EncoderSession | GroupSession | None = None
        self._loading: Future[LoadedModel] | None = None
        self._is_stopping = False
        self._status_due_at = 0.0
        self._turn_began_at: float | None = None
        self.status = EngineStatus()

    @property
    def turn_s(self) -> float:
        """How long the session's present turn has taken; 0 between turns."""
        if isinstance(session := self._session, GroupSession):
            return session.turn_s
        began_at = self._turn_began_at
        return 0.0 if began_at is None else time.monotonic() - began_at

    def run(self) -> None:
        """Work until told to stop; the last act closes this thread's MLX streams.

        What the session itself cannot recover from is raised: who started the thread tells the
        callers.
        """
        try:
            while not self._is_stopping:
                self._turn()
            self._unload(ShuttingDownError("the backend is shutting down"))
        finally:
            self._abandon()
            # Without it the process aborts at exit (mlx 0.32).
            mx.clear_streams()

    def _turn(self) -> None:
        try:
            self._obey()
            if self._session is not None:
                self._turn_began_at = time.monotonic()
                self._session.turn()
                self._turn_began_at = None
                self._answer_aside(self._session)
            self._refresh_status()
        except Exception as error:  # noqa: BLE001 (the top of the thread: models raise anything)
            self._recover(error)

    def _recover(self, error: Exception) -> None:
        self._turn_began_at = None
        if self._loading is not None:
            reply, self._loading = self._loading, None
            self._unload(RequestCancelledError("loading the model failed"))
            answer(reply, error if isinstance(error, BackendError) else _load_error(error))
        elif self._session is not None:
            self._session.recover(error)
        else:
            log.error("the engine failed without a model", exc_info=error)

    def _obey(self) -> None:
        """Carry out the commands that are there; wait for one when there is nothing else to do."""
        is_idle = self._session is None or self._session.is_idle
        while not self._is_stopping:
            try:
                command = self._commands.get(block=is_idle, timeout=self._idle_timeout_s())
            except queue.Empty:
                if is_idle and self._session is not None:
                    self._session.rest()
                return
            self._carry_out(command)
            is_idle = False

    def _carry_out(self, command: Command) -> None:
        match command:
            case Load():
                self._load(command)
            case Submit(request):
                self._submit(request)
            case Cancel(request_id):
                if self._session is not None:
                    self._session.cancel(request_id)
                    self._status_due_at = 0.0
            case Score() | Embed() | Judge():
                self._work_aside(command)
            case Free(reply):
                self._unload(RequestCancelledError("the model was freed"))
                answer(reply, None)
            case Stop():
                self._is_stopping = True
            case Fetched() | GroupNews():
                self._take_in(command)
            case _:
                assert_never(command)

    def _load(self, command: Load) -> None:
        self._unload(RequestCancelledError("another model is being loaded"))
        self._loading = command.reply
        tuning = command.options.tuning
        if tuning.wired_limit_mb > 0:
            mx.set_wired_limit(tuning.wired_limit_mb * 2**20)
        self._session = self._assembled(command)
        # A full collection stops every thread, for 100 ms: let it leave out what stays anyway.
        gc.collect()
        gc.freeze()
        self._loading = None
        self.status = self._session.status()
        if not answer(command.reply, self._session.plain_model()):
            self._unload(LoadCancelledError("the caller of LoadModel left"))

    def _take_in(self, news: Fetched | GroupNews) -> None:
        """Pass on what comes from outside of this thread, if it is for what is loaded now."""
        match self._session, news:
            case (Session() as session, Fetched()):
                session.take_in(news)
            case (GroupSession() as group, GroupNews()):
                group.take_in(news)

    def _assembled(self, command: Load) -> Session | EncoderSession | GroupSession:
        """Return a session in this process, or one that other processes compute together."""
        outlets = Outlets(self._hand_over, self._commands.put)
        cancelled = command.reply.cancelled
        if topology := topology_of(command.options.tuning):
            plan = GroupPlan(topology, command.options, command.directory)
            return form_group(plan, outlets, cancelled=cancelled)
        model = load(command.options, command.directory, cancelled=cancelled)
        return assemble_session(model, command.options, outlets)

    def _submit(self, request: GenerationRequest) -> None:
        if self._session is None:
            self._publish([Publication(request.request_id, ModelNotLoadedError())])
        else:
            self._session.submit(request)

    def _work_aside(self, command: SideCommand) -> None:
        if self._session is None:
            answer(command.reply, ModelNotLoadedError())
        else:
            self._session.work_aside(command)

    def _abandon(self) -> None:
        """Let go of a session that has failed as a whole."""
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(Exception):
                session.close()

    def _unload(self, reason: BackendError) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.fail_all(reason)
            session.close()
        del session
        if gc.get_freeze_count():
            gc.unfreeze()
            gc.collect()
        mx.clear_cache()
        mx.reset_peak_memory()

    def _idle_timeout_s(self) -> float | None:
        return self._session.idle_timeout_s if self._session else None

    def _hand_over(self, publications: Sequence[Publication]) -> None:
        """Publish events of the session, behind a snapshot that knows which requests end."""
        if any(is_last(publication.event) for publication in publications):
            self._take_snapshot()
        self._publish(publications)

    def _answer_aside(self, session: Session | EncoderSession | GroupSession) -> None:
        """Hand out results, behind a snapshot that no longer knows their jobs."""
        if session.has_ended_aside:
            self._take_snapshot()
            session.answer_aside()

    def _refresh_status(self) -> None:
        """Take a snapshot now and then, and before there is nothing to do for long."""
        is_idle = self._session is None or self._session.is_idle
        if is_idle or time.monotonic() >= self._status_due_at:
            self._take_snapshot()

    def _take_snapshot(self) -> None:
        self._status_due_at = time.monotonic() + STATUS_INTERVAL_S
        # Events of a group come on a thread of its own.
        session = self._session
        self.status = session.status() if session else EngineStatus()


def _load_error(error: Exception) -> LoadFailedError:
    log.error("loading failed", exc_info=error)
    return LoadFailedError(f"loading the model failed: {error}")
