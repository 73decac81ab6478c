"""The facade: what the event loop may ask of the engine. Never waits for MLX, never imports it."""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from backend.config import ModelOptions, TuningOptions
from backend.core.embedding import Embedding, EmbeddingRequest
from backend.core.model import ModelCard
from backend.core.request import GenerationRequest
from backend.core.scoring import ScoreRequest
from backend.core.status import EngineState, EngineStatus
from backend.core.step import EngineEvent
from backend.engine.command import Cancel, Command, Embed, Free, Load, Score, Stop, Submit
from backend.engine.stream import Publication, TokenStream
from backend.errors import (
    InvalidRequestError,
    LoadCancelledError,
    LoadFailedError,
    ModelNotLoadedError,
    OverloadedError,
    ShuttingDownError,
)
from backend.model.hub import locate
from backend.model.loaded import LoadedModel
from backend.model.upstream import import_mlx_lm

if TYPE_CHECKING:
    from backend.engine.worker import EngineWorker

THREAD_JOIN_TIMEOUT_S = 3.0

Result = TypeVar("Result")

log = logging.getLogger(__name__)


class Engine:
    """Loads models and runs requests on a thread of its own; lives on one event loop.

    The thread, and with it MLX, starts with the first load.
    """

    def __init__(self, *, locate: Callable[[ModelOptions], Awaitable[Path]] = locate) -> None:
        """Start idle.

        Args:
            locate: Finds the directory of a model, downloading it if need be.
        """
        self._locate = locate
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._worker: EngineWorker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, TokenStream] = {}
        self._side_replies: set[object] = set()
        self._is_unused = asyncio.Event()
        self._is_unused.set()
        self._loads = asyncio.Lock()
        self._load_task: asyncio.Task[LoadedModel] | None = None
        self._has_failed_load = False
        self._is_closing = False
        self._model: LoadedModel | None = None
        self._options: ModelOptions | None = None

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
        return self._thread is not None and self._thread.is_alive()

    async def load(self, options: ModelOptions) -> ModelCard:
        """Load a model in place of the one before; cancelling this cancels the load.

        Loads run one after another. Asking for what is loaded already changes nothing. A model
        that cannot be found leaves the one before; any other failure leaves none.

        Raises:
            LoadError: The model could not be loaded, and why.
        """
        async with self._loads:
            self._refuse_when_closing()
            if self._model is not None and self._options == options and self.is_computing:
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
            return self._model.card

    async def free(self) -> None:
        """End a running load and all requests, and drop the model."""
        if self._load_task is not None:
            self._load_task.cancel()
        # A load that has just ended may not have been noted yet.
        async with self._loads:
            self._model = None
            self._has_failed_load = False
            if self.is_computing:
                reply: Future[None] = Future()
                self._commands.put(Free(reply))
                await asyncio.wrap_future(reply)

    def submit(self, request: GenerationRequest) -> AsyncIterator[Sequence[EngineEvent]]:
        """Queue a request; what the engine has published since the last look comes together.

        Raises:
            ModelNotLoadedError: Nothing is loaded.
            OverloadedError: As many requests as may run and wait are there.
        """
        tuning = self._ready_tuning()
        if len(self._streams) >= tuning.max_slots + tuning.max_waiting:
            raise OverloadedError(
                f"{len(self._streams)} requests are running or waiting already "
                f"(max_slots {tuning.max_slots}, max_waiting {tuning.max_waiting})"
            )
        if request.request_id in self._streams:
            raise InvalidRequestError("CorrelationId", "a request of this id is running")
        stream = self._streams[request.request_id] = TokenStream()
        self._is_unused.clear()
        self._commands.put(Submit(request))
        return stream

    def cancel(self, request_id: str) -> None:
        """End a request; harmless when it has ended or was never known."""
        stream = self._streams.pop(request_id, None)
        if stream is not None and not stream.has_ended:
            self._commands.put(Cancel(request_id))
        self._note_whether_unused()

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

    def status(self) -> EngineStatus:
        """Return the latest snapshot of the engine thread, at once; from any thread."""
        if self._worker is None or self._model is None or not self.is_computing:
            return EngineStatus(state=self._state_without_session())
        return self._worker.status

    async def close(self, *, drain_timeout_s: float) -> None:
        """Refuse new work, let running requests finish up to the timeout, then end the thread."""
        self._is_closing = True
        if self._load_task is not None:
            self._load_task.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_unused.wait(), drain_timeout_s)
        if self._thread is None:
            return
        self._commands.put(Stop())
        await asyncio.to_thread(self._thread.join, THREAD_JOIN_TIMEOUT_S)
        if self.is_computing:
            log.warning("the engine thread is still computing, leaving without it")

    async def _work_aside(self, command: Score | Embed, reply: "Future[Result]") -> Result:
        tuning = self._ready_tuning()
        if len(self._side_replies) > tuning.max_waiting:
            raise OverloadedError(
                f"{len(self._side_replies)} embeddings and scores are running or waiting already "
                f"(max_waiting {tuning.max_waiting})"
            )
        self._side_replies.add(reply)
        self._is_unused.clear()
        self._commands.put(command)
        try:
            return await asyncio.wrap_future(reply)
        finally:
            self._side_replies.discard(reply)
            self._note_whether_unused()

    def _ready_tuning(self) -> TuningOptions:
        """Return the options of the loaded model, if work may be given to it."""
        self._refuse_when_closing()
        if self._model is None or self._options is None or not self.is_computing:
            raise ModelNotLoadedError
        return self._options.tuning

    def _note_whether_unused(self) -> None:
        if not self._streams and not self._side_replies:
            self._is_unused.set()

    async def _load(self, options: ModelOptions) -> LoadedModel:
        directory = await self._locate(options)
        self._model = None
        self._start_thread()
        reply: Future[LoadedModel] = Future()
        self._commands.put(Load(options, directory, reply))
        return await asyncio.wrap_future(reply)

    def _start_thread(self) -> None:
        if not self.is_computing:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._run_worker, name="engine", daemon=True)
            self._thread.start()

    def _run_worker(self) -> None:
        try:
            import_mlx_lm()
            from backend.engine.worker import EngineWorker
        except ImportError as error:
            self._refuse_commands(LoadFailedError(f"MLX cannot be imported: {error}"))
        else:
            self._worker = EngineWorker(self._commands, self._publish)
            self._worker.run()

    def _refuse_commands(self, error: LoadFailedError) -> None:
        """Answer in the place of a worker that could not start."""
        while not isinstance(command := self._commands.get(), Stop):
            if isinstance(command, Load):
                command.reply.set_exception(error)
            elif isinstance(command, Free):
                command.reply.set_result(None)

    def _publish(self, publications: Sequence[Publication]) -> None:
        """Hand a turn's events to the event loop, with one wake-up; called on the engine thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, publications)

    def _deliver(self, publications: Sequence[Publication]) -> None:
        for publication in publications:
            if stream := self._streams.get(publication.request_id):
                stream.deliver(publication.event)

    def _refuse_when_closing(self) -> None:
        if self._is_closing:
            raise ShuttingDownError("the backend is shutting down")

    def _state_without_session(self) -> EngineState:
        if self._load_task is not None:
            return EngineState.BUSY
        has_died = self._model is not None
        is_broken = has_died or self._has_failed_load
        return EngineState.ERROR if is_broken else EngineState.UNINITIALIZED


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
