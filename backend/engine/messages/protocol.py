"""Messages between the server and the engine process, which is rank 0 of one or more.

server --Load, Read, then Submit, Cancel, Expect, Job, Leave, Stop--> engine
server <--Loadable, Loaded, then Told, Answered, Passing, Compiling, Snapshot-- engine
server <--Found at any time; Failed-- engine
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import msgspec
from msgspec import Struct

from backend import errors
from backend.config import ModelOptions
from backend.core.engine_status import EngineStatus
from backend.core.model import ModelCard
from backend.core.prefix_listing import ListingRequest, PromptCacheListing
from backend.core.prompt import MediaKind, PreparedMedium
from backend.core.request import GenerationRequest
from backend.core.scoring import (
    ClassifyRequest,
    DecideRequest,
    Decision,
    Embedding,
    EmbeddingRequest,
    ExtractRequest,
    Judgement,
    JudgeRequest,
    Labels,
    ScoreRequest,
    Scores,
    Spans,
)
from backend.core.step import Steps
from backend.engine.findings import Findings
from backend.errors import BackendError, EngineFailedError, FieldError

if TYPE_CHECKING:
    from backend.cache.disk_tier import StoredNode

_KINDS: Mapping[str, type[BackendError]] = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, BackendError)
}


class Failure(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An error of the backend; its other attributes stay where it was raised."""

    kind: str
    text: str
    field: str = ""

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Return an error as a message; one that is not the backend's is the engine's failure."""
        if isinstance(error, BackendError):
            # The other process knows only the classes of that one module.
            known = next(kind for kind in type(error).__mro__ if kind in _KINDS.values())
            field = error.field if isinstance(error, FieldError) else ""
            return cls(known.__name__, str(error), field)
        return cls(EngineFailedError.__name__, f"{type(error).__name__}: {error}")

    def error(self) -> BackendError:
        """Return the error to raise here."""
        kind = _KINDS.get(self.kind, BackendError)
        error = kind.__new__(kind, self.text)
        if isinstance(error, FieldError):
            error.field = self.field
        return error


BackgroundRequest: TypeAlias = (
    EmbeddingRequest
    | ScoreRequest
    | JudgeRequest
    | ClassifyRequest
    | ExtractRequest
    | DecideRequest
)
"""Background work."""

SessionRequest: TypeAlias = BackgroundRequest | ListingRequest
"""Everything that a loop answers with one result."""


class Submit(Struct, frozen=True, tag=True, array_like=True):
    """Queue a request.

    Attributes:
        generated: Tokens of its reply drawn earlier: the row continues after them.
        losses: Processes lost over it since.
    """

    request: GenerationRequest
    generated: tuple[int, ...] = ()
    losses: int = 0


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


class Load(Struct, frozen=True, tag=True, array_like=True):
    """Look at a model; the first and only one of a process, which waits with its weights.

    Attributes:
        ledger: The directory where backends divide the memory; `None` for none.
    """

    options: ModelOptions
    directory: Path
    ledger: Path | None = None
    known: Mapping[str, Findings] = {}


class Read(Struct, frozen=True, tag=True, array_like=True):
    """Load the model, whose predecessor has gone."""


class PrepareMedium(Struct, frozen=True, tag=True, kw_only=True, array_like=True):
    """Run the model's processor over a medium.

    Attributes:
        content: Of an image [H, W, 3], of a video [T, H, W, 3], or samples [N].
        fps: Frames per second of a video.
    """

    kind: MediaKind
    content: Any
    fps: float
    digest: bytes


class Job(Struct, frozen=True, tag=True, array_like=True):
    """A request for one result or a medium to prepare, with a number."""

    number: int
    request: SessionRequest | PrepareMedium


class Leave(Struct, frozen=True, tag=True, array_like=True):
    """Drop a job whose caller has left."""

    number: int


class Stop(Struct, frozen=True, tag=True, array_like=True):
    """Close the session and end."""


Order: TypeAlias = Load | Read | Submit | Cancel | Expect | Job | Leave | Stop


class MediaFacts(Struct, frozen=True, kw_only=True):
    """The media that a model supports; see `MediaProcessor`."""

    snippets: Mapping[MediaKind, str]
    takes_parts: bool
    sampling_rate: int


class Loadable(Struct, frozen=True, tag=True, array_like=True):
    """Only the weights, and trials with them, can tell more against the load."""


class Loaded(Struct, frozen=True, tag=True, kw_only=True, array_like=True):
    """The model is loaded; `media` is `None` for a text model."""

    card: ModelCard
    status: EngineStatus
    tokenizer_defaults: Mapping[str, Any]
    media: MediaFacts | None


class Told(Struct, frozen=True, tag=True, array_like=True):
    """The steps of requests since the last such message, by their ids: all rows together.

    Attributes:
        failures: Errors that end requests, after their steps.
    """

    steps: Mapping[str, Steps] = {}
    failures: Mapping[str, Failure] = {}


Result: TypeAlias = (
    Embedding | Scores | Judgement | Labels | Spans | Decision | PromptCacheListing | PreparedMedium
)


class Answered(Struct, frozen=True, tag=True, array_like=True):
    """The result of a job, or why there is none."""

    number: int
    result: Result | Failure

    @classmethod
    def of(cls, number: int, result: Any) -> Self:  # noqa: ANN401 (a `Result` or an error)
        """Return the answer with a result or an error."""
        return cls(number, Failure.of(result) if isinstance(result, BaseException) else result)


class Passing(Struct, frozen=True, tag=True, array_like=True):
    """A pass over other rows than the last one starts."""

    requests: Sequence[str]
    has_job: bool = False


class Compiling(Struct, frozen=True, tag=True, array_like=True):
    """The requests for which grammars are being compiled now, beside the passes."""

    requests: Sequence[str]


class Snapshot(Struct, frozen=True, tag=True, array_like=True):
    """The state of the engine."""

    status: EngineStatus


class Found(Struct, frozen=True, tag=True, array_like=True):
    """The findings of a model by now, by its key, for the next process that loads it."""

    key: str
    findings: Findings


class Waiting(Struct, frozen=True, tag=True, array_like=True):
    """The process has begun, and waits for a model."""


class Failed(Struct, frozen=True, tag=True, array_like=True):
    """The model cannot be loaded, or the engine is lost."""

    failure: Failure


News: TypeAlias = (
    Waiting | Loadable | Loaded | Told | Answered | Passing | Compiling | Snapshot | Found | Failed
)
