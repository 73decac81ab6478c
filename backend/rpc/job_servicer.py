"""The RPCs of jobs: training, quantisation and export."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path

from google.protobuf.message import Message

from backend.jobs.job import COMPLETED, FineTuning, JobBoard, Progress, Quantization
from backend.jobs.scratch import list_checkpoints
from backend.pb import backend_pb2 as pb
from backend.rpc.parsing.job_fields import (
    fine_tuning,
    job_id,
    model_export,
    quantization,
    required_path,
)
from common.rpc import Context

# ruff: noqa: N802 - the methods have the names of the RPCs


class JobServicer:
    """The part of the service that starts jobs and reports their progress.

    Attributes:
        models_dir: The models directory of the latest LoadModel; empty for none.
    """

    def __init__(self, download_environment: Mapping[str, str]) -> None:
        self.models_dir = ""
        self._jobs = JobBoard(download_environment)

    async def close_jobs(self) -> None:
        """End all jobs."""
        await self._jobs.close()

    async def StartFineTune(
        self, request: pb.FineTuneRequest, _context: Context
    ) -> pb.FineTuneJobResult:
        """Start a training."""
        job = fine_tuning(request, self.models_dir)
        started = self._jobs.start(job, job_id(request.job_id))
        return pb.FineTuneJobResult(job_id=started, success=True, message="started")

    async def FineTuneProgress(self, request: pb.FineTuneProgressRequest, context: Context) -> None:
        """Send the progress of a training until it ends."""
        updates = self._jobs.updates(request.job_id, FineTuning)
        await _send(context, updates, partial(_training_update, request.job_id))

    async def StopFineTune(self, request: pb.FineTuneStopRequest, _context: Context) -> pb.Result:
        """End a training."""
        progress = await self._jobs.stop(
            request.job_id, FineTuning, keeps_weights=request.save_checkpoint
        )
        is_kept = bool(progress.path) or not request.save_checkpoint
        return pb.Result(success=is_kept, message=progress.message)

    async def ListCheckpoints(
        self, request: pb.ListCheckpointsRequest, _context: Context
    ) -> pb.ListCheckpointsResponse:
        """Answer with the complete checkpoints of a directory, the earliest first."""
        directory = Path(required_path("output_dir", request.output_dir))
        found = await asyncio.to_thread(list_checkpoints, directory)
        return pb.ListCheckpointsResponse(
            checkpoints=[
                pb.CheckpointInfo(
                    path=str(each.path),
                    step=each.step,
                    epoch=each.epoch,
                    loss=each.loss,
                    created_at=each.created_at,
                )
                for each in found
            ]
        )

    async def ExportModel(self, request: pb.ExportModelRequest, _context: Context) -> pb.Result:
        """Write a checkpoint in another form, and answer when it is done."""
        progress = await self._jobs.export(model_export(request, self.models_dir))
        return pb.Result(success=progress.status == COMPLETED, message=progress.message)

    async def StartQuantization(
        self, request: pb.QuantizationRequest, _context: Context
    ) -> pb.QuantizationJobResult:
        """Start a quantisation."""
        job = quantization(request, self.models_dir)
        started = self._jobs.start(job, job_id(request.job_id))
        return pb.QuantizationJobResult(job_id=started, success=True, message="started")

    async def QuantizationProgress(
        self, request: pb.QuantizationProgressRequest, context: Context
    ) -> None:
        """Send the progress of a quantisation until it ends."""
        updates = self._jobs.updates(request.job_id, Quantization)
        await _send(context, updates, partial(_quantisation_update, request.job_id))

    async def StopQuantization(
        self, request: pb.QuantizationStopRequest, _context: Context
    ) -> pb.Result:
        """End a quantisation."""
        progress = await self._jobs.stop(request.job_id, Quantization)
        return pb.Result(success=True, message=progress.message)


async def _send(
    context: Context,
    updates: AsyncGenerator[Progress, None],
    as_message: Callable[[Progress], Message],
) -> None:
    async with aclosing(updates):
        async for progress in updates:
            await context.write(as_message(progress))


def _training_update(job: str, progress: Progress) -> pb.FineTuneProgressUpdate:
    return pb.FineTuneProgressUpdate(
        job_id=job,
        current_step=progress.step,
        total_steps=progress.total_steps,
        current_epoch=progress.epoch,
        total_epochs=progress.total_epochs,
        loss=progress.loss,
        learning_rate=progress.learning_rate,
        eval_loss=progress.eval_loss,
        eta_seconds=progress.eta_s,
        progress_percent=progress.percent,
        status=progress.status,
        message=progress.message,
        checkpoint_path=progress.path,
        extra_metrics=progress.metrics,
    )


def _quantisation_update(job: str, progress: Progress) -> pb.QuantizationProgressUpdate:
    return pb.QuantizationProgressUpdate(
        job_id=job,
        progress_percent=progress.percent,
        status=progress.status,
        message=progress.message,
        output_file=progress.path,
        extra_metrics=progress.metrics,
    )
