"""The engine interfaces that pipelines use. Both refuse work for a replaced model."""

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
        """Announce a request: a closing engine waits for it."""

    def submit(
        self, model: ServedModel, request: GenerationRequest
    ) -> AsyncIterator[Sequence[EngineEvent]]:
        """Queue a request; yields the events published since the last read together."""

    def cancel(self, request_id: str) -> None:
        """Cancel a request; does nothing if it has ended or is unknown."""

    def expect(self, request_id: str) -> None:
        """Note that another request will certainly continue the reply of one that has ended."""


class ComputeEngine(Protocol):
    """Computes vectors, scores and labels; cancelling a call abandons its work."""

    async def compute(self, model: ServedModel, request: ComputeRequest[ResultT]) -> ResultT:
        """Return the result of a request."""
