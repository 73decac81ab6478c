"""What the processes of a group say to each other, as plain values.

server --Form, commands--> rank 0 --Join, Start, Turn--> the other ranks
server <--Formed, Told, Answered, Report, Failed-- rank 0 <--Hello, Ready, Report, Failed--
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from backend.config import ModelOptions
from backend.core import embedding, model, scoring, status
from backend.engine.command import Cancel, Submit
from backend.engine.distributed.topology import (
    Topology,
)
from backend.engine.distributed.wire import Codec
from backend.engine.pace import Pace
from backend.engine.stream import Publication
from backend.errors import BackendError


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """To rank 0: gather the others and load a model.

    Attributes:
        timeout_s: How long a rank may take to come.
    """

    topology: Topology
    options: ModelOptions
    directory: Path
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Hello:
    """From another rank: it is there.

    Attributes:
        size: Of the group it was started for; 0 when whoever started it knows.
        memory_bytes: What its weights may take.
        software: The versions of what has to be the same on all ranks.
    """

    rank: int
    size: int
    process_id: int
    memory_bytes: int
    software: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """To another rank: link up, and load its shard.

    Attributes:
        split: Layers of each rank of a pipeline; none leaves it to the model.
    """

    form: Form
    rank: int
    split: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """From a rank: its shard is loaded.

    Attributes:
        layers: Caches of one sequence.
        cache_kinds: Their kinds, sorted.
        kv_budget_bytes: What there is for KV caches.
        cache_budget_bytes: What of it the prompt cache may take.
    """

    layers: int
    cache_kinds: tuple[str, ...]
    kv_budget_bytes: int
    cache_budget_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """To every rank: begin, with so much for KV caches, and of it for the prompt cache."""

    kv_bytes_per_layer: int
    cache_bytes_per_layer: int


@dataclass(frozen=True, slots=True)
class Formed:
    """From rank 0 to the server: the model is there."""

    card: model.ModelCard
    status: status.EngineStatus


@dataclass(frozen=True, slots=True)
class Leave:
    """Nobody waits for a job beside generation any more."""

    job: int


@dataclass(frozen=True, slots=True)
class Job:
    """A command for work beside generation, without its reply, and a number for it."""

    job: int
    request: scoring.ScoreRequest | embedding.EmbeddingRequest


GroupCommand: TypeAlias = Submit | Cancel | Job | Leave


@dataclass(frozen=True, slots=True)
class Turn:
    """The plan of a turn: the commands that it obeys first, and what the clock allows it."""

    number: int
    commands: tuple[GroupCommand, ...]
    pace: Pace


@dataclass(frozen=True, slots=True)
class Told:
    """From rank 0 to the server: events of requests, in order."""

    publications: tuple[Publication, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """From rank 0 to the server: what a job gave."""

    job: int
    result: Any


@dataclass(frozen=True, slots=True)
class Report:
    """How a rank is doing after a turn.

    Attributes:
        checksum: Of all tokens drawn so far: the same on every rank.
    """

    turn: int
    checksum: int
    status: status.EngineStatus


@dataclass(frozen=True, slots=True)
class Failed:
    """The group is lost, or was never formed."""

    error: BackendError


MESSAGES = (
    *(Form, Hello, Join, Ready, Start, Formed, Turn, Told, Answered, Report, Failed),
    *(Submit, Cancel, Job, Leave, status.EngineStatus, embedding.Embedding),
)


def make_codec() -> Codec:
    """Return a codec of all messages; grammars want `grammars.teach`."""
    return Codec(MESSAGES)
