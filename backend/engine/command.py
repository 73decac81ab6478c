"""What the facade sends to the engine thread.

A reply future is answered on the engine thread; cancelling it is how its caller leaves.
"""

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from backend.config import ModelOptions
from backend.core.request import GenerationRequest
from backend.model.loaded import LoadedModel

if TYPE_CHECKING:
    from backend.cache.node_directory import StoredNode


@dataclass(frozen=True, slots=True)
class Load:
    """Load a model from a directory, after freeing the one before."""

    options: ModelOptions
    directory: Path
    reply: "Future[LoadedModel]"


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue a request."""

    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request before the next step or chunk; no effect when it has ended."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Free:
    """End all requests, drop the model and give its memory back."""

    reply: "Future[None]"


@dataclass(frozen=True, slots=True)
class Stop:
    """End all requests and the thread."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What the disk had for a request; comes from the disk's thread.

    Attributes:
        source: Who asked: a model that was freed meanwhile gets nothing.
    """

    source: object
    request_id: str
    nodes: "tuple[StoredNode, ...]"


Command: TypeAlias = Load | Submit | Cancel | Free | Stop | Fetched
