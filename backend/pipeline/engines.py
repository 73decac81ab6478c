"""The parts of an engine that pipelines use. Both refuse work for a model that was replaced."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from backend.core.compute import ComputeRequest, ResultT
from backend.core.request import GenerationRequest
from backend.core.step import EngineEvent
from backend.pipeline.served_model import ServedModel


class GenerationEngine(Protocol):
    """Generates tokens."""

    def preparation(self, request_id: str) -> AbstractContextManager[None]:
        """Announce a request: an engine that closes meanwhile waits for it."""

    def submit(
        self, model: ServedModel, request: GenerationRequest
    ) -> AsyncIterator[Sequence[EngineEvent]]:
        """Queue a request; events published since the last look come together."""

    def cancel(self, request_id: str) -> None:
        """End a request; harmless when it has ended or was never known."""

    def expect(self, request_id: str) -> None:
        """Note that another request is sure to go on from the reply of one that has ended."""


class ComputeEngine(Protocol):
    """Computes vectors, scores and labels; cancelling a call gives its work up."""

    async def compute(self, model: ServedModel, request: ComputeRequest[ResultT]) -> ResultT:
        """Return the result of a request."""
