"""The facade: what the event loop may ask of the engine. Never waits for MLX, never imports it."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from backend.config import LONG_TURN_S, ModelOptions, TuningOptions
from backend.core.embedding import Embedding, EmbeddingRequest
from backend.core.model import ModelCard
from backend.core.request import GenerationRequest
from backend.core.scoring import JudgeRequest, ScoreRequest
from backend.core.status import EngineState, EngineStatus
from backend.core.step import EngineEvent
from backend.engine.callers import Callers
from backend.engine.command import (
    Cancel,
    Command,
    Embed,
    Free,
    Judge,
    Load,
    Score,
    SideCommand,
    Submit,
)
from backend.engine.thread import EngineThread, MakeWorker, make_worker
from backend.errors import (
    BackendError,
    EngineFailedError,
    InvalidRequestError,
    LoadCancelledError,
    ModelNotLoadedError,
    OverloadedError,
    ShuttingDownError,
)
from backend.model.hub import locate
from backend.model.loaded import LoadedModel

Result = TypeVar("Result")

log = logging.getLogger(__name__)


class Engine:
    """Loads models and runs requests on a thread of its own; lives on one event loop.

    The thread, and with it MLX, starts with the first load. One that dies fails its requests and
    is replaced: the next thread loads the model again, and serves what has come meanwhile.
    """

    def __init__(
        self,
        *,
        locate: Callable[[ModelOptions], Awaitable[Path]] = locate,
        make_worker: MakeWorker = make_worker,
        long_turn_s: float = LONG_TURN_S,
    ) -> None:
        """Start idle.

        Args:
            locate: Finds the directory of a model, downloading it if need be.
            make_worker: Makes what runs on the thread, on the thread.
            long_turn_s: A turn of the thread that takes longer is reported.
        """
        self._fault = ""
        self._note_fault: Callable[[], None] = lambda: None
        self._locate = locate
        self._make_worker = make_worker
        self._long_turn_s = long_turn_s
        self._thread: EngineThread | None = None
        self._revival: asyncio.Future[LoadedModel] | None = None
        self._callers = Callers()
        self._loads = asyncio.Lock()
        self._load_task: asyncio.Task[LoadedModel] | None = None
        self._has_failed_load = False
        self._is_closing = False
        self._model: LoadedModel | None = None
        self._options: ModelOptions | None = None
        self._directory = Path()

    @property
    def model(self) -> LoadedModel | None:
        """The loaded model, or `None`."""
        return self._model

    @property
    def options(self) -> ModelOptions | None:
        """What the loaded model was loaded with, or `None`."""
        return self._options if self._model is not None else None

    @property
    def is_computing(self) -> bool:
        """Whether the engine thread is alive; after `close` it is not, unless it is stuck."""
        return self._thread is not None and self._thread.is_alive

    @property
    def fault(self) -> str:
        """Why nothing can be served: the engine died and could not start anew.

        Empty otherwise, and again after a load that works.
        """
        return self._fault

    def on_fault(self, listener: Callable[[], None]) -> None:
        """Have one listener called, on the event loop, when `fault` has changed."""
        self._note_fault = listener

    async def load(self, options: ModelOptions) -> ModelCard:
        """Load a model in place of the one before; cancelling this cancels the load.

        Loads run one after another. Asking for what is loaded already changes nothing. A model
        that cannot be found leaves the one before; any other failure leaves none.

        Raises:
            LoadError: The model could not be loaded, and why.
        """
        async with self._loads:
            self._refuse_when_closing()
            await self._end_of_revival()
            if self._is_serving and self._model is not None and self._options == options:
                return self._model.card
            self._load_task = asyncio.create_task(self._load(options))
            try:
                self._model = await self._load_task
            except asyncio.CancelledError:
                if _is_being_cancelled():
                    raise
                raise LoadCancelledError("the load was ended by Free or by shutdown") from None
            finally:
                self._load_task = None
                self._has_failed_load = self._model is None
            self._options = options
            self._set_fault("")
            return self._model.card

    async def free(self) -> None:
        """End a running load and all requests, and drop the model."""
        if self._load_task is not None:
            self._load_task.cancel()
        if self._revival is not None:
            self._revival.cancel()
        # A load that has just ended may not have been noted yet.
        async with self._loads:
            await self._end_of_revival()
            self._model = None
            self._has_failed_load = False
            if self.is_computing:
                reply: Future[None] = Future()
                self._put(Free(reply))
                # What has died holds no memory.
                with contextlib.suppress(EngineFailedError):
                    await self._callers.expect(reply)

    def submit(self, request: GenerationRequest) -> AsyncIterator[Sequence[EngineEvent]]:
        """Queue a request; what the engine has published since the last look comes together.

        Raises:
            ModelNotLoadedError: Nothing is loaded.
            OverloadedError: As many requests as may run and wait are there.
        """
        tuning = self._ready_tuning()
        count = len(self._callers.streams)
        if count >= tuning.max_slots + tuning.max_waiting:
            raise OverloadedError(
                f"{count} requests are running or waiting already "
                f"(max_slots {tuning.max_slots}, max_waiting {tuning.max_waiting})"
            )
        if request.request_id in self._callers.streams:
            raise InvalidRequestError("CorrelationId", "a request of this id is running")
        stream = self._callers.enter(request.request_id)
        self._put(Submit(request))
        return stream

    def cancel(self, request_id: str) -> None:
        """End a request; harmless when it has ended or was never known."""
        if self._callers.leave(request_id):
            self._put(Cancel(request_id))

    async def score(self, request: ScoreRequest) -> tuple[tuple[float, ...], ...]:
        """Return the log-probability of every token of every continuation; cancel to leave.

        Raises:
            ModelNotLoadedError: Nothing is loaded.
            OverloadedError: As many of these calls as may wait are there.
        """
        reply: Future[tuple[tuple[float, ...], ...]] = Future()
        return await self._work_aside(Score(request, reply), reply)

    async def embed(self, request: EmbeddingRequest) -> Embedding:
        """Return an embedding; cancel to leave.

        Raises:
            ModelNotLoadedError: Nothing is loaded.
            OverloadedError: As many of these calls as may wait are there.
            UnsupportedError: The model gives no hidden states.
        """
        reply: Future[Embedding] = Future()
        return await self._work_aside(Embed(request, reply), reply)

    async def judge(self, request: JudgeRequest) -> tuple[float, ...]:
        """Return a cross-encoder's logit of every pair; cancel to leave.

        Raises:
            ModelNotLoadedError: Nothing is loaded.
            OverloadedError: As many of these calls as may wait are there.
            UnsupportedError: The model is no cross-encoder.
        """
        reply: Future[tuple[float, ...]] = Future()
        return await self._work_aside(Judge(request, reply), reply)

    def status(self) -> EngineStatus:
        """Return the latest snapshot of the engine thread, at once; from any thread."""
        is_reviving = self._revival is not None
        if self._thread is None or self._model is None or is_reviving or not self.is_computing:
            return EngineStatus(state=self._state_without_session())
        return self._thread.report

    async def close(self, *, drain_timeout_s: float) -> None:
        """Refuse new work, let running requests finish up to the timeout, then end the thread."""
        self._is_closing = True
        if self._load_task is not None:
            self._load_task.cancel()
        await self._callers.have_left(drain_timeout_s)
        if self._revival is not None:
            self._revival.cancel()
        if self._thread is not None and not await self._thread.stop():
            log.warning("the engine thread is still computing, leaving without it")

    async def _work_aside(self, command: SideCommand, reply: "Future[Result]") -> Result:
        tuning = self._ready_tuning()
        if self._callers.side_jobs > tuning.max_waiting:
            raise OverloadedError(
                f"{self._callers.side_jobs} embeddings and scores are running or waiting already "
                f"(max_waiting {tuning.max_waiting})"
            )
        self._put(command)
        return await self._callers.expect_beside(reply)

    def _ready_tuning(self) -> TuningOptions:
        """Return the options of the loaded model, if work may be given to it."""
        self._refuse_when_closing()
        if not self._is_serving or self._options is None:
            raise ModelNotLoadedError
        return self._options.tuning

    @property
    def _is_serving(self) -> bool:
        """Whether there is a model, and all that computes it."""
        if self._thread is None or self._model is None or not self.is_computing:
            return False
        return self._revival is not None or self._thread.status.state is not EngineState.ERROR

    async def _load(self, options: ModelOptions) -> LoadedModel:
        self._directory = await self._locate(options)
        self._model = None
        return await self._begin_load(options)

    def _begin_load(self, options: ModelOptions) -> "asyncio.Future[LoadedModel]":
        """Let the thread, or a new one, load what was located; work may be queued behind it."""
        if not self.is_computing:
            self._thread = EngineThread(
                self._make_worker, self._callers.deliver, self._bury, self._long_turn_s
            )
        reply: Future[LoadedModel] = Future()
        self._put(Load(options, self._directory, reply))
        return self._callers.expect(reply)

    def _put(self, command: Command) -> None:
        if self._thread is not None:
            self._thread.put(command)

    def _bury(self, reason: BackendError) -> None:
        """Fail all that waits for a thread that has died, and replace it if it had a model."""
        self._thread = None
        self._callers.fail_all(reason)
        if self._is_closing or self._loads.locked() or self._revival is not None:
            self._model = None
        elif self._model is not None and self._options is not None:
            self._revive(self._options)

    def _revive(self, options: ModelOptions) -> None:
        try:
            self._revival = self._begin_load(options)
        except EngineFailedError as error:
            self._give_up(error)
        else:
            self._revival.add_done_callback(self._end_revival)

    def _end_revival(self, loading: "asyncio.Future[LoadedModel]") -> None:
        self._revival = None
        if loading.cancelled():
            return
        if (error := loading.exception()) is not None:
            self._give_up(error)
        else:
            model = loading.result()
            if self._model is None or self._model.card != model.card:
                self._model = model
            # Else the old one stays: what callers have prepared for it is still right.
            log.warning("the engine has started anew, with %s", model.card.name)

    def _give_up(self, error: BaseException) -> None:
        log.critical("the engine cannot start anew: %s", error)
        self._model = None
        self._set_fault(str(error))

    def _set_fault(self, fault: str) -> None:
        if fault != self._fault:
            self._fault = fault
            self._note_fault()

    async def _end_of_revival(self) -> None:
        if self._revival is not None:
            await asyncio.wait([self._revival])

    def _refuse_when_closing(self) -> None:
        if self._is_closing:
            raise ShuttingDownError("the backend is shutting down")

    def _state_without_session(self) -> EngineState:
        if self._load_task is not None or self._revival is not None:
            return EngineState.BUSY
        has_died = self._model is not None or bool(self._fault)
        is_broken = has_died or self._has_failed_load
        return EngineState.ERROR if is_broken else EngineState.UNINITIALIZED


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
