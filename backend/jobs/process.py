"""A job in its own process, at the lowest priority: start, follow and stop it."""

import asyncio
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator

import msgspec

from backend.config import JOB_STOP_TIMEOUT_S
from backend.jobs.job import FAILED, STOPPED, Job, Progress

# Sent to the child's standard input: stop, and keep the latest weights.
SAVE_AND_STOP = b"save\n"
# Limit of a progress line, in bytes.
_LINE_LIMIT = 2**20
_FAILURES = (OSError, ValueError, msgspec.MsgspecError)

log = logging.getLogger(__name__)


class JobProcess:
    """Runs one job; followers see its latest progress, and at last its final one.

    The child exits when its standard input ends, so it never outlives this process.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.progress = Progress(status="queued")
        self._process: Process | None = None
        self._news = asyncio.Condition()
        self._is_stopping = False
        self._run = asyncio.create_task(self._follow())

    async def updates(self) -> AsyncGenerator[Progress, None]:
        """Yield the current progress and every change, up to the final one."""
        seen: Progress | None = None
        while seen is None or not seen.is_final:
            async with self._news:
                while self.progress is seen:
                    await self._news.wait()
            seen = self.progress
            yield seen

    async def result(self) -> Progress:
        """Wait for the job to end and return its final progress."""
        await asyncio.shield(self._run)
        return self.progress

    async def stop(self, *, keeps_weights: bool = False) -> Progress:
        """Stop the job and return its final progress; no incomplete files remain.

        Args:
            keeps_weights: Let a training save a checkpoint first.
        """
        self._is_stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            if keeps_weights and process.stdin is not None:
                process.stdin.write(SAVE_AND_STOP)
            else:
                _hang_up(process)
            try:
                await asyncio.wait_for(process.wait(), JOB_STOP_TIMEOUT_S)
            except TimeoutError:
                process.kill()
        return await self.result()

    async def _follow(self) -> None:
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "backend.jobs"), stdin=PIPE, stdout=PIPE, limit=_LINE_LIMIT
            )
            await self._read(self._process)
        except _FAILURES as error:
            await self._tell_end(FAILED, f"the job's process cannot be followed: {error}")
        finally:
            if self._process is not None and self._process.returncode is None:
                self._process.kill()
        kind, progress = type(self.job).__name__, self.progress
        log.info("%s job: %s, %s", kind.lower(), progress.status, progress.message)

    async def _read(self, process: Process) -> None:
        assert process.stdin is not None  # noqa: S101 (for the type checker: it was requested)
        assert process.stdout is not None  # noqa: S101
        process.stdin.write(msgspec.json.encode(self.job) + b"\n")
        if self._is_stopping:
            _hang_up(process)
        async for line in process.stdout:
            await self._tell(msgspec.json.decode(line, type=Progress))
        code = await process.wait()
        if self.progress.is_final:
            return
        if self._is_stopping:
            await self._tell_end(STOPPED, "stopped")
            return
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        await self._tell_end(FAILED, f"the job's process {how}; the backend's log may say why")

    async def _tell_end(self, status: str, message: str) -> None:
        await self._tell(msgspec.structs.replace(self.progress, status=status, message=message))

    async def _tell(self, progress: Progress) -> None:
        async with self._news:
            self.progress = progress
            self._news.notify_all()


def _hang_up(process: Process) -> None:
    """Close a child's standard input, which makes it exit."""
    if process.stdin is not None:
        process.stdin.close()
