"""The one interface between an engine process and a loaded model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from backend.core.model import ModelCard
from backend.core.status import EngineStatus
from backend.engine.messages.commands import (
    Answer,
    Cancel,
    Compute,
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
"""The commands that concern the loaded model; a session ignores news that is not its own."""


@dataclass(frozen=True, slots=True)
class Outlets:
    """The ways out of a session; none of them blocks.

    Attributes:
        hand_over: Takes the events of all requests, in order.
        post: Takes news from other threads; it comes back as a command.
        answer: Takes the results of background computations.
        make_room: Told the size of all weights before more of them are read.
        note_pass: Takes the beginning of each pass: the ids of its requests, and whether it is a
            piece of a background computation.
    """

    hand_over: HandOver
    post: Callable[[Fetched], None]
    answer: Callable[[Sequence[Answer]], None] = deliver_all
    note_pass: NotePass = ignore_pass
    make_room: MakeRoom = need_no_room


class Session(Protocol):
    """A loaded model at work; belongs to the main thread.

    A turn may raise whatever a model raises: the caller passes the error to `recover` and goes on.
    """

    @property
    def is_idle(self) -> bool:
        """Whether a turn would have nothing to compute."""

    @property
    def idle_timeout_s(self) -> float | None:
        """How long an idle session may be left without a turn; `None` is for ever."""

    @property
    def checksum(self) -> int:
        """Sums up all tokens drawn so far, in their order."""

    @property
    def card(self) -> ModelCard:
        """The facts about the model."""

    def obey(self, command: SessionCommand) -> None:
        """Queue, drop or answer what a command names; computes nothing."""

    def pace(self) -> Pace | None:
        """Return what the clock allows the next turn; `None` if turns take nothing from it."""

    def turn(self, pace: Pace | None = None) -> None:
        """Compute one piece of the work; raises whatever the model raises.

        Args:
            pace: What the clock allows; `None` looks at it.
        """

    def recover(self, error: Exception) -> None:
        """Fail the request that the last turn failed on, and no other."""

    def close(self) -> None:
        """Bring to disk what belongs there: the session ends, and somebody else tells callers."""

    def status(self) -> EngineStatus:
        """Return a snapshot."""
