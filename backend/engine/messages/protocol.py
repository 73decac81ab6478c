"""Messages between the server and the engine process, which is rank 0 of one or more.

server --Load, then Submit, Cancel, Expect, Job, Leave, Stop--> engine
server <--Loaded, then Told, Answered, Passing, Snapshot; Failed-- engine
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import Struct

from backend.config import ModelOptions
from backend.core.media import MediaKind
from backend.core.model import ModelCard
from backend.core.status import EngineStatus
from backend.engine.messages.commands import Cancel, Expect, SessionRequest, Submit
from backend.engine.messages.failure import Failure
from backend.engine.messages.results import Classification, Judgement, Listing, Scores, Vectors
from backend.engine.messages.stream import Publication


class Load(Struct, frozen=True, tag=True, array_like=True):
    """Load a model; the first and only one of a process.

    Attributes:
        ledger: The directory where backends divide the memory; `None` divides nothing.
    """

    options: ModelOptions
    directory: Path
    ledger: Path | None = None


class PrepareMedium(Struct, frozen=True, tag=True, kw_only=True, array_like=True):
    """Run the model's processor over a medium.

    Attributes:
        content: Of an image [H, W, 3], of a film [T, H, W, 3], or samples [N].
        fps: Frames of a film in a second.
        digest: Identifies the medium.
    """

    kind: MediaKind
    content: Any
    fps: float
    digest: bytes


class PreparedInputs(Struct, frozen=True, tag=True, kw_only=True, array_like=True):
    """A medium as a prompt takes it in; see `PreparedMedium`."""

    text: str
    token_ids: tuple[int, ...]
    inputs: Mapping[str, Any]
    marks: frozenset[str]


class Job(Struct, frozen=True, tag=True, array_like=True):
    """A request for one result or a medium to prepare, and a number for it."""

    number: int
    request: SessionRequest | PrepareMedium


class Leave(Struct, frozen=True, tag=True, array_like=True):
    """Drop a job: its caller has left."""

    number: int


class Stop(Struct, frozen=True, tag=True, array_like=True):
    """Close the session and end."""


Order: TypeAlias = Load | Submit | Cancel | Expect | Job | Leave | Stop


class MediaFacts(Struct, frozen=True, kw_only=True):
    """The media that a model takes; see `MediaProcessor`."""

    snippets: Mapping[MediaKind, str]
    takes_parts: bool
    sampling_rate: int


class Loaded(Struct, frozen=True, tag=True, kw_only=True, array_like=True):
    """The model is there.

    Attributes:
        tokenizer_defaults: What the model's code says of a tokenizer that says nothing itself.
        media: `None` for a model that reads text only.
    """

    card: ModelCard
    status: EngineStatus
    tokenizer_defaults: Mapping[str, Any]
    media: MediaFacts | None


class Told(Struct, frozen=True, tag=True, array_like=True):
    """Events of requests, in order: all rows of a step together."""

    events: Sequence[Publication]


class Answered(Struct, frozen=True, tag=True, array_like=True):
    """The result of a job."""

    number: int
    result: Vectors | Scores | Judgement | Classification | Listing | PreparedInputs | Failure


class Passing(Struct, frozen=True, tag=True, array_like=True):
    """A pass begins over other rows than the last one.

    Attributes:
        requests: Whose rows.
        has_job: Whether it is a piece of a job.
    """

    requests: Sequence[str]
    has_job: bool = False


class Snapshot(Struct, frozen=True, tag=True, array_like=True):
    """How the engine is doing."""

    status: EngineStatus


class Failed(Struct, frozen=True, tag=True, array_like=True):
    """The model cannot be loaded, or the engine is lost."""

    failure: Failure


News: TypeAlias = Loaded | Told | Answered | Passing | Snapshot | Failed
