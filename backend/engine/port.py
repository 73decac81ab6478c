"""The port of a loop: its way to the server, and to other ranks.

Everything that enters a loop is a command, and a turn follows from its commands and its pace: two
loops with the same commands and paces do the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from backend.core.status import EngineStatus
from backend.engine.background.jobs import BackgroundPace
from backend.engine.messages.commands import (
    Cancel,
    DiskChanged,
    DiskNews,
    Expect,
    Fetched,
    Resize,
    Submit,
)
from backend.engine.messages.protocol import Job, Leave, Stop, Told
from backend.engine.rows.pacing import PrefillPace

Command: TypeAlias = (
    Submit | Cancel | Expect | Job | Leave | Stop | Fetched | DiskChanged | Resize | Told
)
"""Obeyed by a loop in order of arrival. Events of requests are passed on to the server."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The part of a turn that depends on the clock: the work that it allows."""

    prefill: PrefillPace
    background: BackgroundPace


class Reportable(Protocol):
    """A loop as its port sees it."""

    @property
    def checksum(self) -> int:
        """The checksum of all tokens drawn so far, in order."""

    def status(self) -> EngineStatus:
        """Return a snapshot."""


class Port(Protocol):
    """Commands in, results out; nothing but `receive` and `agree` blocks.

    Attributes:
        is_shared: Whether other ranks do the same: then a turn that fails ends all of them.
    """

    is_shared: bool

    def post(self, news: DiskNews | Resize, /) -> None:
        """Take a message of another thread, which comes back as a command."""

    def receive(self, *, waits: bool, timeout_s: float | None) -> Sequence[Command]:
        """Return the commands that have arrived.

        Args:
            waits: Whether to wait for one.
            timeout_s: For so long; `None` is forever.
        """

    def agree(self, pace: Pace | None) -> Pace | None:
        """Return the pace of the turn over the latest commands, the same on all ranks.

        Args:
            pace: That of this rank's clock; `None` if the turn does not depend on it.
        """

    def note_pass(self, request_ids: Sequence[str], /, *, has_job: bool = False) -> None:
        """Tell the server about the next pass, in case that it ends the process.

        Args:
            request_ids: The requests of its rows.
            has_job: Whether it is a piece of a background computation.
        """

    def hand_over(self, told: Told, /) -> None:
        """Send events of requests, in order."""

    def answer(self, results: Sequence[tuple[int, object]], /) -> None:
        """Send the results, or errors, of jobs by their numbers."""

    def report(self, loop: Reportable, *, is_idle: bool) -> None:
        """End a turn: send a status if it is time.

        Args:
            loop: Asked for it.
            is_idle: Whether there is nothing left to do.
        """

    def send_status(self, loop: Reportable) -> None:
        """Send a status now, because something has ended."""
