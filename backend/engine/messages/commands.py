"""Commands to a session; in the engine process, or sent there.

A reply future is answered on the engine's thread; cancelling it is how its caller leaves.
"""

from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct

from backend.core.classification import ClassifyRequest
from backend.core.embedding import EmbeddingRequest
from backend.core.request import GenerationRequest
from backend.core.scoring import JudgeRequest, ScoreRequest
from backend.errors import BackendError

if TYPE_CHECKING:
    from backend.cache.disk.node_directory import StoredNode

SideRequest: TypeAlias = EmbeddingRequest | ScoreRequest | JudgeRequest | ClassifyRequest
"""Work that is computed beside generation."""


class Submit(Struct, frozen=True, tag=True, array_like=True):
    """Queue a request.

    Attributes:
        generated: Tokens of its reply that were drawn before: the row goes on after them.
    """

    request: GenerationRequest
    generated: tuple[int, ...] = ()


class Cancel(Struct, frozen=True, tag=True, array_like=True):
    """End a request before the next step or chunk; no effect when it has ended."""

    request_id: str


class Expect(Struct, frozen=True, tag=True, array_like=True):
    """The reply of a request that has ended calls tools: another one is sure to go on from it."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Compute:
    """Work beside generation; the reply gets its result, or a `BackendError`."""

    request: SideRequest
    reply: "Future[Any]"


@dataclass(frozen=True, slots=True)
class Fetched:
    """What the disk had for a request; comes from the disk's thread.

    Attributes:
        source: Who asked: a model that was freed meanwhile gets nothing.
    """

    source: object
    request_id: str
    nodes: "tuple[StoredNode, ...]"


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


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a computation, or the error that ended it, for the caller that waits for it."""

    reply: "Future[Any]"
    result: object

    def deliver(self) -> None:
        """Give the result to the caller, unless the caller has left."""
        answer(self.reply, self.result)


def deliver_all(answers: Sequence[Answer]) -> None:
    """Give every result to its caller."""
    for each in answers:
        each.deliver()
