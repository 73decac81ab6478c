"""Commands to a loop, created in the engine process or sent to it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct

from backend.core.classification import ClassifyRequest
from backend.core.embedding import EmbeddingRequest
from backend.core.prompt_cache import ListingRequest
from backend.core.request import GenerationRequest
from backend.core.scoring import JudgeRequest, ScoreRequest

if TYPE_CHECKING:
    from backend.cache.disk.node_directory import StoredNode

BackgroundRequest: TypeAlias = EmbeddingRequest | ScoreRequest | JudgeRequest | ClassifyRequest
"""Background work."""

SessionRequest: TypeAlias = BackgroundRequest | ListingRequest
"""Everything that a loop answers with one result."""


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
