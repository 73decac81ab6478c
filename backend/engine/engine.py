"""The facade of the engine for the event loop. Never waits for MLX, never imports it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Protocol, TypeVar, cast

from backend.config import LONG_TURN_S, ModelOptions, SchedulingOptions
from backend.core.engine_status import EngineState, EngineStatus
from backend.core.model import ModelCard
from backend.core.prompt import PreparedMedium
from backend.core.request import ComputeRequest, GenerationRequest, ResultT_co
from backend.core.step import Steps
from backend.engine.distributed.topology import group_size, require_parts
from backend.engine.findings import FindingsStore
from backend.engine.messages.protocol import (
    Expect,
    PrepareMedium,
    SessionRequest,
)
from backend.engine.supervision.engine_process import REFUSALS
from backend.engine.supervision.supervisor import Supervisor
from backend.engine.supervision.text_part import TextPart, loaded_model, read_text_part
from backend.errors import (
    BackendError,
    InvalidRequestError,
    LoadCancelledError,
    LoadError,
    LoadFailedError,
    ModelNotLoadedError,
    ModelReplacedError,
    OverloadedError,
    RequestCancelledError,
    ShuttingDownError,
    UnreadableTokenizerError,
)
from backend.model.checkpoint.config_file import draft_options, read_config
from backend.model.checkpoint.gate import named, require_loadable, require_possible
from backend.model.checkpoint.hub import locate, rooted
from backend.model.loaded import LoadedModel
from common.process import in_own_thread

_BETWEEN_LOADS_S = 0.02

log = logging.getLogger(__name__)


class Handle(Protocol):
    """A loaded model as known to callers of the engine; compared by identity."""

    @property
    def card(self) -> ModelCard:
        """The facts about the model."""


HandleT = TypeVar("HandleT", bound=Handle)
WorkT = TypeVar("WorkT")


@dataclass(frozen=True, slots=True)
class _Served(Generic[HandleT]):
    """The latest loaded model: its handle, the options of its load, and where it is."""

    model: HandleT
    options: ModelOptions
    own: ModelOptions
    directory: Path


class Engine(Generic[HandleT]):
    """Loads models and runs requests in a separate process; lives on one event loop.

    A lost process is replaced: the next one loads the model again, and resumes all open
    requests.
    """

    def __init__(
        self,
        *,
        serve: Callable[[LoadedModel, ModelOptions], HandleT],
        locate: Callable[[ModelOptions], Awaitable[Path]] = locate,
        long_turn_s: float = LONG_TURN_S,
        environment: Mapping[str, str] | None = None,
        memory_ledger: Path | None = None,
        findings: Path | None = None,
    ) -> None:
        """Start idle, without a process.

        Args:
            serve: Creates the handle of a model when its load ends; all work must carry it.
            locate: Finds the directory of a model, downloading it if necessary.
            environment: Of the engine's processes; `None` is this process's.
            memory_ledger: The directory where backends share the machine's memory; `None` does not
                share it.
            findings: The file of findings of models; `None` keeps them in memory only.
        """
        self._serve = serve
        self._locate = locate
        self._supervisor = Supervisor(
            self._give_up, long_turn_s, environment, memory_ledger, FindingsStore(findings)
        )
        self.calls = self._supervisor.calls
        self._fault = ""
        self._must_exit = asyncio.Event()
        self._note_fault: Callable[[], None] = lambda: None
        self._has_prepared = False
        self._loads = asyncio.Lock()
        # Each check parses files, and so takes the interpreter for moments.
        self._checks = asyncio.Lock()
        self._waiting_loads = 0
        self._frees = 0
        self.load_task: asyncio.Task[HandleT] | None = None
        self._has_failed_load = False
        self._is_closing = False
        self._model: HandleT | None = None
        self._served: _Served[HandleT] | None = None

    @property
    def model(self) -> HandleT | None:
        """The handle of the loaded model, or `None`."""
        return self._model

    @property
    def has_waiting_loads(self) -> bool:
        """Whether a load will begin when the present one ends."""
        return self._waiting_loads > 0

    @property
    def process_id(self) -> int | None:
        """The id of the process with the model, if there is one."""
        return self._supervisor.process_id

    @property
    def fault(self) -> str:
        """The reason why the engine cannot serve: several processes in a row could not start.

        Empty otherwise, and again after a successful load.
        """
        return self._fault

    def on_fault(self, listener: Callable[[], None]) -> None:
        """Call one listener, on the event loop, whenever `fault` changes."""
        self._note_fault = listener

    async def wait_until_broken(self) -> None:
        """Wait until the engine has failed for good and the options request an exit."""
        await self._must_exit.wait()

    def prepare(self) -> None:
        """Start a process before it is needed, and again whenever a model has been freed."""
        self._has_prepared = True
        self._supervisor.starter.prepare()

    async def load(self, options: ModelOptions) -> ModelCard:
        """Replace the loaded model; cancelling this cancels the load.

        Loads run one after another. Loading the same model again changes nothing. A load that
        its files and options show to be impossible waits for no other, and leaves the previous
        model serving; after a later failure, or when it is cancelled, the previous one is loaded
        again, if possible.

        Raises:
            LoadError: The model could not be loaded; the message gives the reason.
        """
        frees = self._frees
        if self._loads.locked():
            # In its turn it is checked again: its files may have changed.
            async with self._checks:
                await in_own_thread(require_possible, options)
        async with self._turn():
            self._refuse_when_closing()
            if frees != self._frees:
                raise _load_was_ended()
            if self._is_loaded(options) and self._model is not None:
                return self._model.card
            self.load_task = asyncio.create_task(self._load(options))
            try:
                self._model = await self.load_task
            except asyncio.CancelledError:
                if _is_being_cancelled():
                    self.load_task.cancel()
                    await asyncio.wait([self.load_task])
                    if self._model is None:
                        # It may have just been loaded.
                        await self._supervisor.end(RequestCancelledError("the load was cancelled"))
                    raise
                raise _load_was_ended() from None
            except BaseException:
                self._has_failed_load = self._model is None
                raise
            finally:
                self.load_task = None
            self._has_failed_load = False
            self._set_fault("")
            return self._model.card

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Let other loads end first."""
        self._waiting_loads += 1
        try:
            await self._loads.acquire()
        finally:
            self._waiting_loads -= 1
        try:
            yield
        finally:
            self._loads.release()

    async def loaded_model(self, timeout_s: float) -> HandleT | None:
        """Return the handle of the model; while one is being loaded, wait for it.

        Raises:
            ShuttingDownError: There is none, and the engine is closing.
        """
        deadline = time.monotonic() + timeout_s
        while self._model is None and (self.load_task is not None or self.has_waiting_loads):
            if (left_s := deadline - time.monotonic()) <= 0:
                break
            if self.load_task is None:
                # The next one begins when Free has ended the process, or at once.
                await asyncio.sleep(min(left_s, _BETWEEN_LOADS_S))
            else:
                # The outcome is for the caller of the load, which notes it right after.
                await asyncio.wait([self.load_task], timeout=left_s)
                await asyncio.sleep(0)
        if self._model is None:
            self._refuse_when_closing()
        return self._model

    async def free(self) -> None:
        """End all loads and requests, and with the process all of its memory."""
        self._frees += 1
        if self.load_task is not None:
            self.load_task.cancel()
        # A load that has just ended may not be recorded yet.
        async with self._loads:
            self._model = self._served = None
            self._has_failed_load = False
            await self._supervisor.end(RequestCancelledError("the model was freed"))
            if self._has_prepared and not self._is_closing:
                self._supervisor.starter.prepare()

    def preparation(self, request_id: str) -> contextlib.AbstractContextManager[None]:
        """Announce a request: until the block ends, `submit` accepts it, even while closing.

        Raises:
            ShuttingDownError: The engine is closing.
        """
        self._refuse_when_closing()
        return self.calls.preparation(request_id)

    def submit(self, model: HandleT, request: GenerationRequest) -> AsyncIterator[Steps]:
        """Queue a request; its steps since the last look come together.

        Raises:
            ModelNotLoadedError: Nothing is loaded.
            OverloadedError: The maximum of running and waiting requests is reached.
            ModelReplacedError: Another model has replaced this one.
        """
        if request.request_id not in self.calls.preparing:
            self._refuse_when_closing()
        limits = self._limits(model)
        count = len(self.calls.requests)
        if count >= limits.max_slots + limits.max_waiting:
            raise OverloadedError(
                f"{count} requests are running or waiting already "
                f"(max_slots {limits.max_slots}, max_waiting {limits.max_waiting})"
            )
        if request.request_id in self.calls.requests:
            raise InvalidRequestError("CorrelationId", "a request with this id is running")
        return self.calls.submit(request)

    def cancel(self, request_id: str) -> None:
        """End a request; harmless if it has ended or was never known."""
        self.calls.cancel(request_id)

    def expect(self, request_id: str, *, is_again: bool = False) -> None:
        """Announce a request that continues an ended one, or sends its prompt again."""
        self.calls.tell(Expect(request_id, is_again))

    async def compute(self, model: HandleT, request: ComputeRequest[ResultT_co]) -> ResultT_co:
        """Return the result of a request; cancelling this drops it.

        Raises:
            ModelNotLoadedError: Nothing is loaded.
            OverloadedError: The maximum of waiting calls is reached.
            ModelReplacedError: Another model has replaced this one.
            UnsupportedError: This kind of model does not compute it.
        """
        self._refuse_when_closing()
        limits = self._limits(model)
        count = self.calls.background_jobs
        if count > limits.max_waiting:
            raise OverloadedError(
                f"{count} embeddings and scores are running or waiting already "
                f"(max_waiting {limits.max_waiting})"
            )
        result: ResultT_co = await self.calls.compute(cast("SessionRequest", request))
        return result

    def status(self) -> EngineStatus:
        """Return the latest snapshot of the engine, at once; from any thread."""
        if self._model is None or not self._supervisor.is_serving:
            status = EngineStatus(state=self._state_without_model())
        else:
            status = self._supervisor.status()
        return replace(status, processes=self._supervisor.processes())

    async def close(self, *, drain_timeout_s: float) -> None:
        """Refuse new work, wait for running requests up to the timeout, then end the process."""
        self._is_closing = True
        if self.load_task is not None:
            self.load_task.cancel()
            await asyncio.wait([self.load_task])
        await self.calls.have_left(drain_timeout_s)
        reason = ShuttingDownError("the backend is shutting down")
        await self._supervisor.end(reason, drops_spare=True)

    async def _prepared(self, request: PrepareMedium) -> PreparedMedium:
        """Have a medium prepared by the process with the model."""
        if self._model is None or not self._supervisor.is_serving:
            raise self._without_model()
        prepared: PreparedMedium = await self.calls.compute(request)
        return prepared

    def _without_model(self) -> BackendError:
        """Return the error of a request whose model has gone."""
        if self.load_task is not None:
            return ModelReplacedError("another model is being loaded")
        return ModelNotLoadedError()

    def _limits(self, model: HandleT) -> SchedulingOptions:
        """Return the limits of the loaded model, if the handle is not stale."""
        if not self._supervisor.is_serving or self._model is None or self._served is None:
            raise self._without_model()
        if model is not self._model:
            # Its tokens mean something else to the present model.
            raise ModelReplacedError("another model was loaded while the request was prepared")
        return self._served.options.tuning.scheduling

    async def _load(self, options: ModelOptions) -> HandleT:
        directory = (await self._locate(options)).absolute()
        own = await self._with_draft(rooted(options))
        await in_own_thread(_require_loadable, own, directory)
        text = asyncio.create_task(in_own_thread(read_text_part, own, directory))
        try:
            await self._look(own, directory, text)
        except BaseException:
            text.cancel()
            await self._supervisor.drop_next()
            raise
        previous, frees = self._served, self._frees
        try:
            self._model = None
            await self._supervisor.end(ModelReplacedError("another model is being loaded"))
            loaded = await _beside(text, self._supervisor.load())
            whole = await loaded_model(own, loaded, await text, self._prepared)
            model = self._serve(whole, options)
        except BaseException as error:
            text.cancel()
            await self._supervisor.drop_next()
            await self._supervisor.end(RequestCancelledError("loading the model failed"))
            is_wanted = frees == self._frees and not (self._is_closing or self.has_waiting_loads)
            if previous is not None and isinstance(error, REFUSALS):
                twin = copy(error)
                twin.args = (f"{error}. {await self._come_back(previous)}",)
                raise twin from error
            if previous is not None and is_wanted and isinstance(error, asyncio.CancelledError):
                await self._come_back(previous)
            raise
        self._served = _Served(model, options, own, directory)
        return model

    async def _look(
        self, own: ModelOptions, directory: Path, text: "asyncio.Task[TextPart]"
    ) -> None:
        """Have another process look at a model, while the present one goes on serving."""
        if own.environment:
            await self._supervisor.starter.prepare_with(dict(own.environment))
        await _beside(text, self._supervisor.look(own, directory))
        if self._model is not None:
            await text

    async def _come_back(self, previous: "_Served[HandleT]") -> str:
        """Load the previous model again, if possible, and return a sentence on the outcome."""
        name = previous.model.card.name
        log.warning("the load has not succeeded: loading %s again", name)
        try:
            await self._supervisor.look(previous.own, previous.directory)
            await self._supervisor.load()
        except BackendError as failure:
            log.warning("%s cannot be loaded again: %s", name, failure)
            self._served = None
            return f"No model is loaded now: {name} could not be loaded again"
        self._model = previous.model
        return f"{name} is loaded again"

    async def _with_draft(self, options: ModelOptions) -> ModelOptions:
        """Return options with the directory of the draft model, if one is requested."""
        draft = draft_options(options)
        if draft is None:
            return replace(options, tuning=options.tuning.updated(draft_model=None))
        with named("draft_model"):
            directory = (await self._locate(draft)).absolute()
        return replace(options, tuning=options.tuning.updated(draft_model=str(directory)))

    def _is_loaded(self, options: ModelOptions) -> bool:
        served = self._served
        return self._supervisor.is_serving and served is not None and served.options == options

    def _give_up(self, error: BackendError) -> None:
        if self._served is not None and self._served.options.tuning.process.exit_when_broken:
            self._must_exit.set()
        self._model = None
        self._set_fault(str(error))

    def _set_fault(self, fault: str) -> None:
        if fault != self._fault:
            self._fault = fault
            self._note_fault()

    def _refuse_when_closing(self) -> None:
        if self._is_closing:
            raise ShuttingDownError("the backend is shutting down")

    def _state_without_model(self) -> EngineState:
        if self.load_task is not None:
            return EngineState.BUSY
        is_broken = bool(self._fault) or self._has_failed_load
        return EngineState.ERROR if is_broken else EngineState.UNINITIALIZED


def _require_loadable(options: ModelOptions, directory: Path) -> None:
    require_loadable(options, directory)
    require_parts(options.tuning, read_config(directory))
    if options.adapters and group_size(options.tuning) > 1:
        problem = "a model on several processes takes no adapters"
        raise InvalidRequestError(options.adapters[0].field, problem)


async def _beside(text: "asyncio.Task[TextPart]", work: Coroutine[None, None, WorkT]) -> WorkT:
    """Return the result of the work; an error of the text part is raised before its own.

    A tokenizer that cannot be made may have its reason elsewhere: the process tells more.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task, text], return_when=asyncio.FIRST_EXCEPTION)
        if task.done() and isinstance(task.exception(), LoadFailedError):
            # The tokenizer may have ended the process.
            await asyncio.wait([text])
        problem = text.exception() if text.done() else None
        is_known = isinstance(problem, LoadError)
        if is_known and not isinstance(problem, UnreadableTokenizerError):
            await text
        return await task
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # Retrieved: that of the text came first.


def _load_was_ended() -> LoadCancelledError:
    return LoadCancelledError("the load was ended by Free or by shutdown")


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
