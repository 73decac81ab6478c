"""The one interface between an engine process and a loaded model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from backend.core.model import ModelCard
from backend.core.status import EngineStatus
from backend.engine.findings import Notebook
from backend.engine.messages.commands import (
    Answer,
    Cancel,
    Compute,
    DiskNews,
    Expect,
    Fetched,
    Resize,
    Submit,
    deliver_all,
)
from backend.engine.messages.publisher import HandOver
from backend.engine.session.pace import NotePass, Pace, ignore_pass
from backend.model.checkpoint.weights import MakeRoom, need_no_room

SessionCommand: TypeAlias = Submit | Cancel | Expect | Compute | Fetched | Resize
"""The commands for the loaded model; a session ignores those not meant for it."""


@dataclass(frozen=True, slots=True)
class Outlets:
    """The outputs of a session; none of them blocks.

    Attributes:
        hand_over: Receives the events of all requests, in order.
        post: Takes messages from other threads, which come back as commands.
        answer: Receives the results of background computations.
        make_room: Told the size of all weights before more of them are read.
        notebook: What loads have found of models.
        note_pass: Called at the start of each pass: the ids of its requests, and whether it is a
            piece of a background computation.
    """

    hand_over: HandOver
    post: Callable[[DiskNews], None]
    answer: Callable[[Sequence[Answer]], None] = deliver_all
    note_pass: NotePass = ignore_pass
    make_room: MakeRoom = need_no_room
    notebook: Notebook = field(default_factory=Notebook)


class Session(Protocol):
    """A loaded model at work; belongs to the main thread.

    A turn may raise any error of a model: the caller passes it to `recover` and continues.
    """

    @property
    def is_idle(self) -> bool:
        """Whether a turn would have nothing to compute."""

    @property
    def idle_timeout_s(self) -> float | None:
        """How long an idle session may be left without a turn; `None` is forever."""

    @property
    def checksum(self) -> int:
        """The checksum of all tokens drawn so far, in order."""

    @property
    def card(self) -> ModelCard:
        """The facts about the model."""

    def obey(self, command: SessionCommand) -> None:
        """Handle a command by queueing, dropping or answering; computes nothing."""

    def pace(self) -> Pace | None:
        """Return the work that the clock allows in the next turn; `None` if it does not matter."""

    def turn(self, pace: Pace | None = None) -> None:
        """Compute one piece of the work; passes on the model's errors.

        Args:
            pace: The work that the clock allows; `None` reads the clock.
        """

    def recover(self, error: Exception) -> None:
        """Fail only the request that made the last turn fail."""

    def close(self) -> None:
        """Write pending nodes to disk and end; others notify the callers."""

    def status(self) -> EngineStatus:
        """Return a snapshot."""
