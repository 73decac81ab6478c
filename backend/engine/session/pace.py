"""The work that the clock allows in a turn, as one plain value: all else follows from commands."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from backend.engine.background.jobs import BackgroundPace
from backend.engine.rows.pacing import PrefillPace


class NotePass(Protocol):
    """Called at the start of a pass."""

    def __call__(self, request_ids: Sequence[str], /, *, has_job: bool = False) -> None:
        """Record the requests of the pass, and whether it is a piece of a job."""


def ignore_pass(_request_ids: Sequence[str], /, *, has_job: bool = False) -> None:
    """Record nothing."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The part of a turn that depends on the clock.

    Two sessions with the same commands and the same pace do the same.
    """

    prefill: PrefillPace
    background: BackgroundPace
