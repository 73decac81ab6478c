"""The jobs of this process, by id."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Mapping

from msgspec.structs import replace

from backend.config import MAX_ENDED_JOBS, MAX_JOBS
from backend.errors import InvalidRequestError, OverloadedError, ShuttingDownError
from backend.jobs.job import Export, Job, Progress
from backend.jobs.process import JobProcess


class JobBoard:
    """Starts jobs and finds them again; lives on one event loop."""

    def __init__(self, download_environment: Mapping[str, str]) -> None:
        """Start without jobs.

        Args:
            download_environment: Of the downloads of models.
        """
        self._download_environment = dict(download_environment)
        self._jobs: dict[str, JobProcess] = {}
        self._is_closed = False

    def start(self, job: Job, job_id: str = "") -> str:
        """Start a job and return its id: the caller's, or a new one.

        Raises:
            InvalidRequestError: A job with this id, or one with the same target, is running.
            OverloadedError: The limit of running jobs is reached.
            ShuttingDownError: The process is shutting down.
        """
        job_id = job_id or uuid.uuid4().hex[:12]
        self._require_room(job, job_id)
        for ended in self._ended()[:-MAX_ENDED_JOBS]:
            del self._jobs[ended]
        # Moves a reused id to the end of the order.
        self._jobs.pop(job_id, None)
        self._jobs[job_id] = JobProcess(self._complete(job))
        return job_id

    def updates(self, job_id: str, kind: type[Job]) -> AsyncGenerator[Progress, None]:
        """Yield a job's progress until its end.

        Raises:
            InvalidRequestError: There is no such job.
        """
        return self._find(job_id, kind).updates()

    async def stop(self, job_id: str, kind: type[Job], *, keeps_weights: bool = False) -> Progress:
        """Stop a job and return its final progress.

        Raises:
            InvalidRequestError: There is no such job.
        """
        return await self._find(job_id, kind).stop(keeps_weights=keeps_weights)

    async def export(self, job: Export) -> Progress:
        """Run an export and return its final progress; cancelling this stops the export.

        Raises:
            As in `start`.
        """
        process = self._jobs[self.start(job)]
        try:
            return await process.result()
        finally:
            await process.stop()

    async def close(self) -> None:
        """Accept no more jobs, and stop all running ones."""
        self._is_closed = True
        stops = (job.stop() for job in list(self._jobs.values()))
        await asyncio.gather(*stops, return_exceptions=True)

    def _complete(self, job: Job) -> Job:
        return replace(job, download_environment=self._download_environment)

    def _require_room(self, job: Job, job_id: str) -> None:
        if self._is_closed:
            raise ShuttingDownError("the backend is shutting down")
        running = {key: each for key, each in self._jobs.items() if not each.progress.is_final}
        if job_id in running:
            raise InvalidRequestError("job_id", f"job {job_id!r} is running")
        if len(running) >= MAX_JOBS:
            raise OverloadedError(f"{len(running)} jobs are running, at most {MAX_JOBS} may")
        for key, other in running.items():
            if other.job.target == job.target:
                problem = f"job {key!r} is writing to {job.target}"
                raise InvalidRequestError(job.target_field, problem)

    def _ended(self) -> list[str]:
        return [key for key, job in self._jobs.items() if job.progress.is_final]

    def _find(self, job_id: str, kind: type[Job]) -> JobProcess:
        job = self._jobs.get(job_id)
        if job is None or not isinstance(job.job, kind):
            raise InvalidRequestError(
                "job_id",
                f"this process has no job {job_id!r}; jobs end with the process that runs them",
            )
        return job
