"""Engine processes: one and its connection, and their start, one of them in advance."""

import asyncio
import contextlib
import logging
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, Self, cast

from backend.config import ENGINE_START_S
from backend.engine.messages.codec import Codec, FrameReader, WireError
from backend.engine.messages.protocol import (
    Failed,
    Load,
    Loadable,
    Loaded,
    News,
    Order,
    Read,
    Stop,
    Waiting,
)
from backend.engine.processes import ending, kill_tree, start_engine
from backend.errors import (
    BackendError,
    EngineFailedError,
    GroupLostError,
    GroupNotFormedError,
    InvalidRequestError,
    LoadError,
    LoadFailedError,
    UnsupportedError,
)

_POLL_INTERVAL_S = 0.01
# Time for its last log lines.
_EXIT_TIMEOUT_S = 3.0
_REAP_TIMEOUT_S = 5.0
# Errors of a load that pass unchanged; others become a failure of the load.
REFUSALS = (LoadError, InvalidRequestError, UnsupportedError)


log = logging.getLogger(__name__)


class EngineProcess(asyncio.Protocol):
    """Lives on one event loop; loads one model and ends with it.

    Attributes:
        silent_since: Time of its last message, by the monotonic clock.
        is_mute: Whether it has told nothing but that it waits.
    """

    def __init__(
        self,
        hear: Callable[["EngineProcess", News], None],
        note_end: Callable[["EngineProcess", BackendError], None],
        environment: Mapping[str, str] | None,
    ) -> None:
        """Create the object; see `started`.

        Args:
            hear: Receives its messages once a model is loaded.
            note_end: Called with the reason when it has ended by itself, after its last message.
            environment: Its own; `None` is this process's.
        """
        self._hear = hear
        self._note_end = note_end
        self._codec = Codec(News)
        self._frames = FrameReader()
        self._transport: asyncio.WriteTransport | None = None
        self._loading: asyncio.Future[Loadable | Loaded] | None = None
        self._reason: BackendError | None = None
        self._is_ending = False
        self._has_begun = asyncio.Event()
        self._farewell: asyncio.Task[None] | None = None
        self.order: Load
        self.silent_since = time.monotonic()
        self.is_mute = True
        # The kernel ends it with its starting thread, that of the event loop.
        self._socket, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as unless_started:
            unless_started.callback(self._socket.close)
            self._child = start_engine(theirs.fileno(), environment)
            unless_started.pop_all()

    @classmethod
    async def started(
        cls,
        hear: Callable[["EngineProcess", News], None],
        note_end: Callable[["EngineProcess", BackendError], None],
        environment: Mapping[str, str] | None,
    ) -> Self:
        """Return a new process that waits for a model."""
        process = cls(hear, note_end, environment)
        loop = asyncio.get_running_loop()
        try:
            await loop.create_unix_connection(lambda: process, sock=process._socket)
        except BaseException:
            process._socket.close()
            await process.end()
            raise
        return process

    @property
    def process_id(self) -> int:
        """Its process id."""
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        """Whether it is running."""
        return self._child.poll() is None

    async def begun(self) -> None:
        """Wait until it can load a model.

        Raises:
            BackendError: It has ended.
        """
        await self._has_begun.wait()
        if self._reason is not None:
            raise self._reason

    async def look(self, order: Load) -> None:
        """Have it look at a model, without its weights; fails as `load`."""
        self.order = order
        await self._answer_to(order)

    async def load(self) -> Loaded:
        """Have it load the model that it has looked at.

        Raises:
            LoadError: It failed, with the reason; the process ends.
            InvalidRequestError: An option cannot be met.
            UnsupportedError: The model cannot be loaded as asked.
        """
        return cast("Loaded", await self._answer_to(Read()))

    async def _answer_to(self, order: Load | Read) -> Loadable | Loaded:
        self._loading = asyncio.get_running_loop().create_future()
        if self._farewell is not None:
            self._loading.set_exception(self._load_failure())
        self.send(order)
        return await self._loading

    def send(self, order: Order) -> None:
        """Send an order; it is lost if the process is gone.

        Raises:
            WireError: It contains a value that cannot be sent.
        """
        frame = self._codec.encode(order)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(frame.parts())

    async def end(self, grace_s: float = 0.0) -> None:
        """End it and its descendants; the kernel cleans up.

        Args:
            grace_s: Time to write pending nodes to disk.
        """
        self._is_ending = True
        try:
            if grace_s and self._reason is None:
                self.send(Stop())
                await self._exited(grace_s)
        finally:
            kill_tree(self._child)
            if self._transport is not None:
                self._transport.close()
            if self._loading is not None and not self._loading.done():
                self._loading.cancel()
            await self._exited(_REAP_TIMEOUT_S)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start sending."""
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """Handle received bytes."""
        self.silent_since = time.monotonic()
        try:
            for frame in self._frames.feed(data):
                self._note(self._codec.decode(frame))
        except WireError as error:
            self._reason = EngineFailedError(str(error))
            kill_tree(self._child)

    def connection_lost(self, _error: Exception | None) -> None:
        """Find out the reason, unless it was told to end."""
        if not self._is_ending:
            self._farewell = asyncio.create_task(self._take_leave())

    def _note(self, message: News) -> None:
        self.is_mute = isinstance(message, Waiting)
        match message:
            case Waiting():
                self._has_begun.set()
            case Failed(failure):
                self._reason = failure.error()
            case Loadable() | Loaded() if self._loading is not None and not self._loading.done():
                self._loading.set_result(message)
            case _:
                self._hear(self, message)

    async def _take_leave(self) -> None:
        await self._exited(_EXIT_TIMEOUT_S)
        if self._reason is None:
            told = ending(self._child, timeout_s=0.0)
            self._reason = EngineFailedError(f"its process ({self.process_id}) {told}")
        kill_tree(self._child)
        self._has_begun.set()
        if self._loading is not None and not self._loading.done():
            self._loading.set_exception(self._load_failure())
        elif not self._is_ending:
            self._note_end(self, self._reason)

    def _load_failure(self) -> BackendError:
        match self._reason:
            case GroupLostError() as error:
                return GroupNotFormedError(f"while the model was loading: {error}")
            case BackendError() as error if isinstance(error, REFUSALS):
                return error
            case reason:
                why = reason or "its process has hung up"
                return LoadFailedError(f"loading the model failed: {why}")

    async def _exited(self, timeout_s: float) -> None:
        """Wait until it has exited, up to the timeout."""
        deadline = time.monotonic() + timeout_s
        while self.is_alive and time.monotonic() < deadline:  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(_POLL_INTERVAL_S)


@dataclass(eq=False, slots=True)
class Starter:
    """Starts processes; lives on one event loop."""

    _hear: Callable[[EngineProcess, News], None]
    _note_end: Callable[[EngineProcess, BackendError], None]
    _environment: Mapping[str, str] | None
    _spare: "asyncio.Task[EngineProcess] | None" = None
    _variables: Mapping[str, str] = field(default_factory=dict)

    def prepare(self) -> None:
        """Start a spare process that waits for a model, unless there is one, to speed up a load."""
        if self._spare is None:
            self._variables, self._spare = {}, asyncio.create_task(self.started())

    async def prepare_with(self, variables: Mapping[str, str]) -> None:
        """Have a spare process with variables in its environment.

        Raises:
            InvalidRequestError: It ends, or hangs, before it could load a model.
        """
        await self.drop_spare()
        self._variables, self._spare = variables, asyncio.create_task(self.started(variables))
        process = await asyncio.shield(self._spare)
        try:
            async with asyncio.timeout(ENGINE_START_S):
                await process.begun()
        except TimeoutError:
            await self._refuse_spare(f"its process has not begun after {ENGINE_START_S:g} s")
        except BackendError as error:
            await self._refuse_spare(f"{error}; its last words are in the log")

    async def _refuse_spare(self, problem: str) -> NoReturn:
        await self.drop_spare()
        raise InvalidRequestError("EnvVars", f"no engine starts with them: {problem}")

    async def drop_spare(self) -> None:
        """End the spare process."""
        if (spare := await self._taken_spare()) is not None:
            await spare.end()

    async def started(self, variables: Mapping[str, str] | None = None) -> EngineProcess:
        """Return a new process.

        Raises:
            LoadFailedError: The system cannot start one.
        """
        environment = self._environment
        if variables:
            environment = {**(environment or {}), **variables}
        try:
            return await EngineProcess.started(self._hear, self._note_end, environment)
        except (OSError, subprocess.SubprocessError) as error:
            raise LoadFailedError(f"the engine's process cannot be started: {error}") from error

    async def looked(self, order: Load) -> EngineProcess:
        """Return a process that has looked at a model; fails as `EngineProcess.load`."""
        variables = dict(order.options.environment)
        if variables != self._variables:
            # A process that is running keeps the environment in which it began.
            await self.drop_spare()
        process = await self._taken_spare()
        if process is not None and process.is_alive:
            try:
                return await _looked(process, order)
            except LoadFailedError as error:
                # A silent one may have ended while it waited, which is not the load's fault.
                if not process.is_mute:
                    raise
                log.warning("%s; another process tries it", error)
        process = await self.started(variables)
        return await _looked(process, order)

    async def _taken_spare(self) -> EngineProcess | None:
        """Return the spare process, if there is one and it has started."""
        if self._spare is None:
            return None
        # If the caller leaves now, the process stays for the next one.
        await asyncio.wait([self._spare])
        spare, self._spare = self._spare, None
        if (error := spare.exception()) is not None:
            log.warning("no process waits for a model: %s", error)
            return None
        return spare.result()


async def _looked(process: EngineProcess, order: Load) -> EngineProcess:
    async with ended_on_failure(process):
        await process.look(order)
    return process


@contextlib.asynccontextmanager
async def ended_on_failure(process: EngineProcess) -> AsyncIterator[None]:
    """End a process if the block fails."""
    try:
        yield
    except BaseException:
        await process.end()
        raise
