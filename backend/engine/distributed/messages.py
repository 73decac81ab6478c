"""Messages between the ranks of a group.

rank 0 --Join, Start, Turn--> the other ranks
rank 0 <--Hello, Ready, Report, Failed-- the other ranks
"""

from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from backend.config import ModelOptions
from backend.core import status
from backend.engine.distributed.topology import Topology
from backend.engine.messages.codec import Codec
from backend.engine.messages.commands import Cancel, Expect, Submit
from backend.engine.messages.protocol import Failed, Job, Leave
from backend.engine.port import Pace

CHECK_INTERVAL_TURNS = 32
"""Turns between comparisons of the tokens of all ranks."""


class Form(Struct, frozen=True, kw_only=True):
    """A group, and the model that it will load.

    Attributes:
        timeout_s: How long a rank may take to join.
    """

    topology: Topology
    options: ModelOptions
    directory: Path
    timeout_s: float


class Hello(Struct, frozen=True, tag=True, array_like=True):
    """From another rank: it is present.

    Attributes:
        size: Of the group it was started for; 0 if only its starter knows.
        memory_bytes: The memory for its weights.
        software: The versions that must be equal on all ranks.
    """

    rank: int
    size: int
    process_id: int
    memory_bytes: int
    software: str


class Join(Struct, frozen=True, tag=True, kw_only=True, array_like=True):
    """To another rank: link up, and load its shard.

    Attributes:
        split: Layers of each rank of a pipeline; none leaves it to the model.
    """

    form: Form
    rank: int
    split: tuple[int, ...] = ()


class Ready(Struct, frozen=True, tag=True, kw_only=True, array_like=True):
    """From a rank: its shard is loaded.

    Attributes:
        layers: Number of caches of one sequence.
        cache_kinds: Their kinds, sorted.
        kv_budget_bytes: The memory for KV caches.
        cache_budget_bytes: The part of it for the prompt cache.
    """

    layers: int
    cache_kinds: tuple[str, ...]
    kv_budget_bytes: int
    cache_budget_bytes: int


class Start(Struct, frozen=True, tag=True, kw_only=True, array_like=True):
    """To every rank: start, with the memory for KV caches, and its part for the prompt cache."""

    kv_bytes_per_layer: int
    cache_bytes_per_layer: int


GroupCommand: TypeAlias = Submit | Cancel | Expect | Job | Leave


class Turn(Struct, frozen=True, tag=True, array_like=True):
    """The plan of a turn: its commands, and the work that the clock allows.

    Attributes:
        pace: `None` if the turn does not depend on the clock.
    """

    number: int
    commands: tuple[GroupCommand, ...]
    pace: Pace | None


class Report(Struct, frozen=True, tag=True, array_like=True):
    """The state of a rank after a turn.

    Attributes:
        checksum: Of all tokens drawn so far; equal on every rank.
    """

    turn: int
    checksum: int
    status: status.EngineStatus


Message: TypeAlias = Hello | Join | Ready | Start | Turn | Report | Failed


def make_codec() -> Codec:
    """Return a codec of the messages between ranks; it reads no grammars yet."""
    return Codec(Message)
