"""The engine interfaces that pipelines use. Both refuse work for a replaced model."""

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import Protocol

from backend.core.request import ComputeRequest, GenerationRequest, ResultT
from backend.core.step import Steps
from backend.pipeline.served_model import ServedModel


class GenerationEngine(Protocol):
    """Generates tokens."""

    def preparation(self, request_id: str) -> AbstractContextManager[None]:
        """Announce a request: a closing engine waits for it."""

    def submit(self, model: ServedModel, request: GenerationRequest) -> AsyncIterator[Steps]:
        """Queue a request; yields all its steps since the last look together."""

    def cancel(self, request_id: str) -> None:
        """Cancel a request; does nothing if it has ended or is unknown."""

    def expect(self, request_id: str, *, is_again: bool = False) -> None:
        """Note that another request will continue the reply of an ended one.

        Args:
            request_id: The ended one.
            is_again: Whether the other one sends its prompt again instead.
        """


class ComputeEngine(Protocol):
    """Computes vectors, scores and labels; cancelling a call abandons its work."""

    async def compute(self, model: ServedModel, request: ComputeRequest[ResultT]) -> ResultT:
        """Return the result of a request."""
