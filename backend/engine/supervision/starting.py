"""Starts engine processes, one of them in advance, and has them load a model."""

import asyncio
import logging
import subprocess
from collections.abc import Callable, Mapping

from backend.engine.findings import Findings
from backend.engine.messages.protocol import Loaded, News
from backend.engine.supervision.process import Charge, EngineProcess
from backend.errors import BackendError, LoadFailedError

log = logging.getLogger(__name__)


class Starter:
    """Starts processes; lives on one event loop."""

    def __init__(
        self,
        hear: Callable[[EngineProcess, News], None],
        note_end: Callable[[EngineProcess, BackendError], None],
        environment: Mapping[str, str] | None,
    ) -> None:
        """Create a starter; the arguments are those of `EngineProcess`."""
        self._hear = hear
        self._note_end = note_end
        self._environment = environment
        self._spare: asyncio.Task[EngineProcess] | None = None

    def prepare(self) -> None:
        """Start a spare process that waits for a model, unless there is one, to speed up a load."""
        if self._spare is None:
            self._spare = asyncio.create_task(self.started())

    async def drop_spare(self) -> None:
        """End the spare process."""
        if (spare := await self._taken_spare()) is not None:
            await spare.end()

    async def started(self, variables: Mapping[str, str] | None = None) -> EngineProcess:
        """Return a new process.

        Args:
            variables: Added to its environment.

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

    async def loaded(
        self, charge: Charge, known: Mapping[str, Findings]
    ) -> tuple[EngineProcess, Loaded]:
        """Return a process that has loaded a model, and the facts about it.

        Args:
            charge: The model.
            known: What earlier loads found.

        Raises:
            LoadError: It could not be loaded; the message gives the reason.
            InvalidRequestError: An option cannot be met.
            UnsupportedError: The model cannot be loaded as asked.
        """
        variables = dict(charge.options.environment)
        # A process that is running keeps the environment in which it began.
        process = None if variables else await self._taken_spare()
        if process is not None and process.is_alive:
            try:
                return process, await _loaded(process, charge, known)
            except LoadFailedError as error:
                # A silent one may have ended while it waited, which is not the load's fault.
                if not process.is_mute:
                    raise
                log.warning("%s; another process tries it", error)
        process = await self.started(variables)
        return process, await _loaded(process, charge, known)

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


async def _loaded(process: EngineProcess, charge: Charge, known: Mapping[str, Findings]) -> Loaded:
    """Have a process load a model; if it cannot, the process ends."""
    try:
        return await process.load(charge, known)
    except BaseException:
        await process.end()
        raise
