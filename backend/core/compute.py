"""Work that a model does in one answer, between the steps of generation."""

from typing import Generic, TypeVar

from msgspec import Struct

ResultT = TypeVar("ResultT")


class ComputeRequest(Struct, Generic[ResultT], frozen=True):
    """A request in the engine's terms, by the type of its result."""
