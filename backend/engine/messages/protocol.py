"""Messages between the server and the engine process, which is rank 0 of one or more.

server --Load, then Submit, Cancel, Expect, Job, Leave, Stop--> engine
server <--Loaded, then Told, Answered, Passing, Compiling, Snapshot; Found at any time-- engine
server <--Failed-- engine
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

from msgspec import Struct

from backend.config import ModelOptions
from backend.core.classification import Labels
from backend.core.embedding import Embedding
from backend.core.media import MediaKind
from backend.core.model import ModelCard
from backend.core.prompt_cache import PromptCacheListing
from backend.core.scoring import Judgement, Scores
from backend.core.status import EngineStatus
from backend.core.step import Steps
from backend.engine.findings import Findings
from backend.engine.messages.commands import Cancel, Expect, SessionRequest, Submit
from backend.engine.messages.failure import Failure


class Load(Struct, frozen=True, tag=True, array_like=True):
    """Load a model; the first and only one of a process.

    Attributes:
        ledger: The directory where backends divide the memory; `None` for none.
        known: What earlier loads found of models, by their keys.
    """

    options: ModelOptions
    directory: Path
    ledger: Path | None = None
    known: Mapping[str, Findings] = {}


class PrepareMedium(Struct, frozen=True, tag=True, kw_only=True, array_like=True):
    """Run the model's processor over a medium.

    Attributes:
        content: Of an image [H, W, 3], of a video [T, H, W, 3], or samples [N].
        fps: Frames per second of a video.
        digest: Identifies the medium.
    """

    kind: MediaKind
    content: Any
    fps: float
    digest: bytes


class PreparedInputs(Struct, frozen=True, tag=True, kw_only=True, array_like=True):
    """A medium prepared for a prompt; see `PreparedMedium`."""

    text: str
    token_ids: tuple[int, ...]
    inputs: Mapping[str, Any]
    marks: frozenset[str]
    lead: str = ""
    rules: tuple[tuple[str, str], ...] = ()


class Job(Struct, frozen=True, tag=True, array_like=True):
    """A request for one result or a medium to prepare, with a number."""

    number: int
    request: SessionRequest | PrepareMedium


class Leave(Struct, frozen=True, tag=True, array_like=True):
    """Drop a job whose caller has left."""

    number: int


class Stop(Struct, frozen=True, tag=True, array_like=True):
    """Close the session and end."""


Order: TypeAlias = Load | Submit | Cancel | Expect | Job | Leave | Stop


class MediaFacts(Struct, frozen=True, kw_only=True):
    """The media that a model supports; see `MediaProcessor`."""

    snippets: Mapping[MediaKind, str]
    takes_parts: bool
    sampling_rate: int


class Loaded(Struct, frozen=True, tag=True, kw_only=True, array_like=True):
    """The model is loaded.

    Attributes:
        tokenizer_defaults: The model code's defaults for its tokenizer.
        media: `None` for a text model.
    """

    card: ModelCard
    status: EngineStatus
    tokenizer_defaults: Mapping[str, Any]
    media: MediaFacts | None


class Told(Struct, frozen=True, tag=True, array_like=True):
    """What requests did since the last such message, by their ids: all rows together.

    Attributes:
        steps: Of each request.
        failures: Errors that end requests, after their steps.
    """

    steps: Mapping[str, Steps] = {}
    failures: Mapping[str, Failure] = {}

    @property
    def has_end(self) -> bool:
        """Whether a request ends."""
        return bool(self.failures) or any(
            each.finish_reason is not None for each in self.steps.values()
        )


Result: TypeAlias = Embedding | Scores | Judgement | Labels | PromptCacheListing | PreparedInputs


class Answered(Struct, frozen=True, tag=True, array_like=True):
    """The result of a job, or why there is none."""

    number: int
    result: Result | Failure

    @classmethod
    def of(cls, number: int, result: Any) -> Self:  # noqa: ANN401 (a `Result` or an error)
        """Return the answer with a result or an error."""
        return cls(number, Failure.of(result) if isinstance(result, BaseException) else result)


class Passing(Struct, frozen=True, tag=True, array_like=True):
    """A pass over other rows than the last one starts.

    Attributes:
        requests: The requests of the rows.
        has_job: Whether it is a piece of a job.
    """

    requests: Sequence[str]
    has_job: bool = False


class Compiling(Struct, frozen=True, tag=True, array_like=True):
    """The requests for which grammars are being compiled now, beside the passes."""

    requests: Sequence[str]


class Snapshot(Struct, frozen=True, tag=True, array_like=True):
    """The state of the engine."""

    status: EngineStatus


class Found(Struct, frozen=True, tag=True, array_like=True):
    """What is known of a model by now, by its key, for the next process that loads it."""

    key: str
    findings: Findings


class Failed(Struct, frozen=True, tag=True, array_like=True):
    """The model cannot be loaded, or the engine is lost."""

    failure: Failure


News: TypeAlias = Loaded | Told | Answered | Passing | Compiling | Snapshot | Found | Failed
