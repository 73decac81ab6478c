"""Starts engine processes, one of them before it is needed, and has them load a model."""

import asyncio
import logging
import subprocess
from collections.abc import Callable, Mapping

from backend.engine.messages.protocol import Loaded, News
from backend.engine.supervision.process import Charge, EngineProcess
from backend.errors import BackendError, LoadFailedError

log = logging.getLogger(__name__)


class Starter:
    """Lives on one event loop."""

    def __init__(
        self,
        hear: Callable[[EngineProcess, News], None],
        note_end: Callable[[EngineProcess, BackendError], None],
        environment: Mapping[str, str] | None,
    ) -> None:
        """Start nothing yet; the arguments are those of `EngineProcess`."""
        self._hear = hear
        self._note_end = note_end
        self._environment = environment
        self._spare: asyncio.Task[EngineProcess] | None = None

    def prepare(self) -> None:
        """Start a process that waits for a model, unless one does: a load need not wait then."""
        if self._spare is None:
            self._spare = asyncio.create_task(self.started())

    async def drop_spare(self) -> None:
        """End the process that waits for a model."""
        if (spare := await self._taken_spare()) is not None:
            await spare.end()

    async def started(self) -> EngineProcess:
        """Return a new process.

        Raises:
            LoadFailedError: The system starts none.
        """
        try:
            return await EngineProcess.started(self._hear, self._note_end, self._environment)
        except (OSError, subprocess.SubprocessError) as error:
            raise LoadFailedError(f"the engine's process cannot be started: {error}") from error

    async def loaded(self, charge: Charge) -> tuple[EngineProcess, Loaded]:
        """Return a process that has loaded a model, and the facts about it.

        Raises:
            LoadError: It could not be loaded, and why.
            InvalidRequestError: An option cannot be met.
            UnsupportedError: The model cannot be loaded as asked.
        """
        process = await self._taken_spare()
        if process is not None and process.is_alive:
            try:
                return process, await _loaded(process, charge)
            except LoadFailedError as error:
                # One that says nothing may have ended while it waited: that is no load's fault.
                if not process.is_mute:
                    raise
                log.warning("%s; another process tries it", error)
        process = await self.started()
        return process, await _loaded(process, charge)

    async def _taken_spare(self) -> EngineProcess | None:
        """Return the process that waits, if there is one and it has started."""
        if self._spare is None:
            return None
        # A caller that leaves now leaves the process to the next one.
        await asyncio.wait([self._spare])
        spare, self._spare = self._spare, None
        if (error := spare.exception()) is not None:
            log.warning("no process waits for a model: %s", error)
            return None
        return spare.result()


async def _loaded(process: EngineProcess, charge: Charge) -> Loaded:
    """Have a process load a model; if it cannot, the process ends."""
    try:
        return await process.load(charge)
    except BaseException:
        await process.end()
        raise
