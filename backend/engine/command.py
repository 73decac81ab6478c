"""What the facade sends to the engine thread.

A reply future is answered on the engine thread; cancelling it is how its caller leaves.
"""

from concurrent.futures import Future, InvalidStateError
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from backend.config import ModelOptions
from backend.core.embedding import Embedding, EmbeddingRequest
from backend.core.request import GenerationRequest
from backend.core.scoring import JudgeRequest, ScoreRequest
from backend.errors import BackendError
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
class Score:
    """Compute log-probabilities beside generation: per continuation, and token."""

    request: ScoreRequest
    reply: "Future[tuple[tuple[float, ...], ...]]"


@dataclass(frozen=True, slots=True)
class Embed:
    """Compute an embedding beside generation."""

    request: EmbeddingRequest
    reply: "Future[Embedding]"

    @property
    def length(self) -> int:
        """How many tokens the text has."""
        return len(self.request.token_ids)


@dataclass(frozen=True, slots=True)
class Judge:
    """Compute the logits of pairs with a cross-encoder."""

    request: JudgeRequest
    reply: "Future[tuple[float, ...]]"


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


SideCommand: TypeAlias = Score | Embed | Judge
"""What is computed beside generation."""


@dataclass(frozen=True, slots=True)
class GroupNews:
    """A group of processes has a new status; comes from the thread that listens to it.

    Attributes:
        source: Whose news: a group that was given up meanwhile has none.
        loss: Why the group is lost, if it is.
    """

    source: object
    loss: BackendError | None = None


Command: TypeAlias = Load | Submit | Cancel | SideCommand | Free | Stop | Fetched | GroupNews


def answer(reply: "Future[Any]", value: object) -> bool:
    """Answer a reply unless its caller has left; an error is raised anew at the caller's end."""
    try:
        if isinstance(value, BackendError):
            reply.set_exception(copy(value))
        else:
            reply.set_result(value)
    except InvalidStateError:
        return False
    return True
