"""Commands to a session, created in the engine process or sent to it.

A reply future is answered on the main thread; its caller leaves by cancelling it.
"""

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct

from backend.core.classification import ClassifyRequest
from backend.core.embedding import EmbeddingRequest
from backend.core.prompt_cache import ListingRequest
from backend.core.request import GenerationRequest
from backend.core.scoring import JudgeRequest, ScoreRequest
from backend.errors import BackendError

if TYPE_CHECKING:
    from backend.cache.disk.node_directory import StoredNode

BackgroundRequest: TypeAlias = EmbeddingRequest | ScoreRequest | JudgeRequest | ClassifyRequest
"""Background work."""

SessionRequest: TypeAlias = BackgroundRequest | ListingRequest
"""Everything that a session answers with one result."""


class Submit(Struct, frozen=True, tag=True, array_like=True):
    """Queue a request.

    Attributes:
        generated: Tokens of its reply drawn earlier: the row continues after them.
    """

    request: GenerationRequest
    generated: tuple[int, ...] = ()


class Cancel(Struct, frozen=True, tag=True, array_like=True):
    """End a request before the next step or chunk; no effect if it has ended."""

    request_id: str


class Expect(Struct, frozen=True, tag=True, array_like=True):
    """An ended request will be continued: its reply calls tools.

    Attributes:
        is_again: The caller left before the end of the reply, and will send the prompt again.
    """

    request_id: str
    is_again: bool = False


@dataclass(frozen=True, slots=True)
class Compute:
    """A request for one result; the reply gets it, or a `BackendError`."""

    request: SessionRequest
    reply: "Future[Any]"


@dataclass(frozen=True, slots=True)
class Fetched:
    """The nodes on disk for a request; sent by the disk's thread."""

    request_id: str
    nodes: "tuple[StoredNode, ...]"


@dataclass(frozen=True, slots=True)
class DiskChanged:
    """All queued nodes were written, so the status is out of date; sent by the disk's thread."""


DiskNews: TypeAlias = Fetched | DiskChanged


@dataclass(frozen=True, slots=True)
class Resize:
    """Apply another budget; sent by the thread that reads the machine's ledger.

    Attributes:
        number: Of the order; the first is 1.
        budget_bytes: The new limit for requests and prompt cache; memory that running requests
            have reserved beyond it stays theirs until they end.
        attainable_bytes: The budget once the others have given their due.
    """

    number: int
    budget_bytes: int
    attainable_bytes: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a computation, or its error, for the waiting caller."""

    reply: "Future[Any]"
    result: object

    def deliver(self) -> None:
        """Give the result to the caller, unless the caller has left."""
        with contextlib.suppress(InvalidStateError):
            if isinstance(self.result, BackendError):
                self.reply.set_exception(copy(self.result))
            else:
                self.reply.set_result(self.result)


def deliver_all(answers: Sequence[Answer]) -> None:
    """Give every result to its caller."""
    for each in answers:
        each.deliver()
