"""Jobs, their progress and final states; they travel between processes as JSON."""

import asyncio
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from backend.config import JOB_STOP_TIMEOUT_S, MAX_ENDED_JOBS, MAX_JOBS
from backend.core.request import new_id
from backend.errors import InvalidRequestError, OverloadedError, ShuttingDownError
from common.log import shortened

COMPLETED, FAILED, STOPPED = "completed", "failed", "stopped"
EXPORT_FORMS = "lora", "merged_16bit", "merged_4bit"
FINAL_STATES = frozenset({COMPLETED, FAILED, STOPPED})

log = logging.getLogger(__name__)


class _Job(Struct, frozen=True, kw_only=True):
    """Common to all jobs.

    Attributes:
        download_environment: Of the download of its model, which may need secrets; empty for that
            of the job.
    """

    download_environment: dict[str, str] = {}

    @property
    def target_field(self) -> str:
        return "output_dir"


class Quantization(_Job, frozen=True, tag=True, kw_only=True):
    """Write an MLX model with quantised weights.

    Attributes:
        models_dir: Base directory of relative names; empty for none.
        name: Name of the result, which becomes a directory in `output_dir`.
        bits: Bits per weight; `None` uses the mode's or the recipe's.
        group_size: Weights that share a scale; `None` uses the mode's default.
        mode: `affine`, `mxfp4`, `nvfp4` or `mxfp8`.
        recipe: A mixed recipe of mlx-lm, such as `mixed_4_6`; empty for none.
        is_checked: Whether to compare the result's perplexity with that of the source.
    """

    model: str
    models_dir: str
    output_dir: str
    name: str
    bits: int | None = None
    group_size: int | None = None
    mode: str = "affine"
    recipe: str = ""
    is_checked: bool = True

    @property
    def target(self) -> Path:
        """Directory of the result."""
        return Path(self.output_dir) / self.name


class FineTuning(_Job, frozen=True, tag=True, kw_only=True):
    """Train an adapter, or all weights, on conversations or texts.

    Attributes:
        kind: `lora`, `dora` or `full`.
        alpha: An adapter's output is scaled by alpha / rank.
        targets: Names of the layers to adapt; empty for all linear layers.
        dataset: A file or a directory of JSONL, JSON, CSV or text.
        max_steps: Optimiser steps; 0 derives them from the epochs.
        save_steps: Steps between checkpoints; 0 saves only the last.
        resume_from: Checkpoint to start from; empty for none.
        optimizer: `adam`, `adamw`, `sgd`, `adafactor` or `muon`.
        max_tokens: Length limit of a sequence; longer ones are truncated at the end.
        masks_prompt: Whether only the last reply of a conversation counts in the loss.
    """

    model: str
    models_dir: str
    output_dir: str
    dataset: str
    kind: str
    rank: int
    alpha: int
    dropout: float
    targets: tuple[str, ...]
    learning_rate: float
    epochs: int
    batch_size: int
    accumulation: int
    warmup_steps: int
    max_steps: int
    save_steps: int
    weight_decay: float
    checkpoints_gradients: bool
    optimizer: str
    seed: int
    resume_from: str
    max_tokens: int
    masks_prompt: bool

    @property
    def target(self) -> Path:
        """Directory of the checkpoints."""
        return Path(self.output_dir)


class Export(_Job, frozen=True, tag=True, kw_only=True):
    """Export a trained checkpoint in a form that can be loaded.

    Attributes:
        form: One of `EXPORT_FORMS`: the adapter alone, or merged into its model.
        model: The base model; empty for the one named in the checkpoint.
    """

    checkpoint: str
    output_path: str
    form: str
    model: str
    models_dir: str

    @property
    def target(self) -> Path:
        """Directory of the result."""
        return Path(self.output_path)

    @property
    def target_field(self) -> str:
        """The request field that names the target."""
        return "output_path"


Job: TypeAlias = Quantization | FineTuning | Export


class Progress(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The progress of a job.

    Attributes:
        status: One of the host's status words; those in `FINAL_STATES` are final.
        percent: From 0 to 100.
        eta_s: Estimated seconds left.
    """

    status: str
    message: str = ""
    percent: float = 0.0
    step: int = 0
    total_steps: int = 0
    epoch: float = 0.0
    total_epochs: float = 0.0
    loss: float = 0.0
    eval_loss: float = 0.0
    learning_rate: float = 0.0
    eta_s: float = 0.0
    path: str = ""
    metrics: dict[str, float] = {}

    @property
    def is_final(self) -> bool:
        """Whether this is the last progress."""
        return self.status in FINAL_STATES

    def sendable(self) -> "Progress":
        """Return a copy that JSON can encode, with a message of bounded length."""
        numbers = {
            name: 0.0
            for name in self.__struct_fields__
            if isinstance(value := getattr(self, name), float) and not isfinite(value)
        }
        metrics = {name: value for name, value in self.metrics.items() if isfinite(value)}
        message = shortened(self.message)
        return replace(self, message=message, metrics=metrics, **numbers)


Report: TypeAlias = Callable[[Progress], None]
"""Receives a job's progress."""


# Sent to the child's standard input: stop, and keep the latest weights.
SAVE_AND_STOP = b"save\n"
# Limit of a progress line, in bytes.
_LINE_LIMIT = 2**20
_FAILURES = (OSError, ValueError, msgspec.MsgspecError)


async def start_process() -> Process:
    """Start `python -m backend.jobs`, which waits for a job."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "backend.jobs"), stdin=PIPE, stdout=PIPE, limit=_LINE_LIMIT
    )


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
                _close_input(process)
            try:
                await asyncio.wait_for(process.wait(), JOB_STOP_TIMEOUT_S)
            except TimeoutError:
                process.kill()
        return await self.result()

    async def _follow(self) -> None:
        try:
            self._process = await start_process()
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
            _close_input(process)
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


def _close_input(process: Process) -> None:
    """Close a child's standard input, which makes it exit."""
    if process.stdin is not None:
        process.stdin.close()


class JobBoard:
    """Starts jobs and finds them again; lives on one event loop."""

    def __init__(self, download_environment: Mapping[str, str]) -> None:
        self._download_environment = dict(download_environment)
        self._jobs: dict[str, JobProcess] = {}
        self._is_closed = False

    def start(self, job: Job, job_id: str = "") -> str:
        """Start a job and return its id: the caller's, or a new one.

        Raises:
            OverloadedError: The limit of running jobs is reached.
            ShuttingDownError: The process is shutting down.
        """
        job_id = job_id or new_id()
        self._require_room(job, job_id)
        ended = [key for key, process in self._jobs.items() if process.progress.is_final]
        for key in ended[:-MAX_ENDED_JOBS]:
            del self._jobs[key]
        # Moves a reused id to the end of the order.
        self._jobs.pop(job_id, None)
        complete = replace(job, download_environment=self._download_environment)
        self._jobs[job_id] = JobProcess(complete)
        return job_id

    def updates(self, job_id: str, kind: type[Job]) -> AsyncGenerator[Progress, None]:
        """Yield a job's progress until its end."""
        return self._find(job_id, kind).updates()

    async def stop(self, job_id: str, kind: type[Job], *, keeps_weights: bool = False) -> Progress:
        """Stop a job and return its final progress."""
        return await self._find(job_id, kind).stop(keeps_weights=keeps_weights)

    async def export(self, job: Export) -> Progress:
        """Run an export and return its final progress; cancelling this stops the export."""
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

    def _find(self, job_id: str, kind: type[Job]) -> JobProcess:
        job = self._jobs.get(job_id)
        if job is None or not isinstance(job.job, kind):
            raise InvalidRequestError(
                "job_id",
                f"this process has no job {job_id!r}; jobs end with the process that runs them",
            )
        return job
