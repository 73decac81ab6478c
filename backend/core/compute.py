"""Work that the model answers in one piece, between generation steps."""

from typing import Generic, TypeVar

from msgspec import Struct

ResultT = TypeVar("ResultT")


class ComputeRequest(Struct, Generic[ResultT], frozen=True):
    """A request in the engine's terms, parameterized by the type of its result."""
