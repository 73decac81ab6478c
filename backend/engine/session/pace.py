"""What the clock allows a turn, as one plain value: all else follows from commands."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from backend.engine.background.jobs import BackgroundPace
from backend.engine.rows.pacing import PrefillPace


class NotePass(Protocol):
    """Takes the beginning of a pass."""

    def __call__(self, request_ids: Sequence[str], /, *, has_job: bool = False) -> None:
        """Note whose rows are in it, and whether it is a piece of a job."""


def ignore_pass(_request_ids: Sequence[str], /, *, has_job: bool = False) -> None:
    """Note nothing."""


@dataclass(frozen=True, slots=True)
class Pace:
    """All that a turn takes from the clock.

    Two sessions that obey the same commands at the same pace do the same.
    """

    prefill: PrefillPace
    background: BackgroundPace
