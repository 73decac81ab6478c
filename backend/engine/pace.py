"""What the clock allows a turn, as one plain value: all else follows from commands."""

from dataclasses import dataclass

from backend.engine.pacing import PrefillPace
from backend.engine.side_jobs import SidePace


@dataclass(frozen=True, slots=True)
class Pace:
    """All that a turn takes from the clock.

    Two sessions that obey the same commands at the same pace do the same.
    """

    prefill: PrefillPace
    aside: SidePace
