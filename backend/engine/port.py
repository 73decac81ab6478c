"""The port of a loop: its way to the server, and to other ranks; events go out together.

Everything that enters a loop is a command, and a turn follows from its commands and its pace: two
loops with the same commands and paces do the same.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from backend.core.engine_status import EngineStatus
from backend.core.step import EngineEvent, Steps
from backend.engine.background.jobs import BackgroundPace
from backend.engine.messages.protocol import (
    Cancel,
    DiskChanged,
    DiskNews,
    Expect,
    Failure,
    Fetched,
    Job,
    Leave,
    Resize,
    Stop,
    Submit,
    Told,
)
from backend.engine.rows.pacing import Counters, PrefillPace
from backend.errors import BackendError

Command: TypeAlias = Submit | Cancel | Expect | Job | Leave | Stop | Fetched | DiskChanged | Resize
"""Obeyed by a loop in order of arrival."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The part of a turn that depends on the clock: the work that it allows."""

    prefill: PrefillPace
    background: BackgroundPace


class Reportable(Protocol):
    """A loop as its port sees it."""

    counters: Counters

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
        """Return the commands that have arrived; wait up to the timeout, `None` is forever."""

    def agree(self, pace: Pace | None) -> Pace | None:
        """Return the pace of the turn over the latest commands, the same on all ranks.

        Args:
            pace: That of this rank's clock; `None` if the turn does not depend on it.
        """

    def note_pass(self, request_ids: Sequence[str], /, *, has_job: bool = False) -> None:
        """Tell the server about the next pass, in case that it ends the process."""

    def hand_over(self, told: Told, /) -> None:
        """Send events of requests, in order."""

    def answer(self, results: Sequence[tuple[int, object]], /) -> None:
        """Send the results, or errors, of jobs by their numbers."""

    def report(self, loop: Reportable, *, is_idle: bool) -> None:
        """End a turn: send a status if it is time."""

    def send_status(self, loop: Reportable) -> None:
        """Send a status now, because something has ended."""


HandOver: TypeAlias = Callable[[Told], None]


class Publisher:
    """Collects the events of all requests; on one thread.

    A reply on the wire costs about as much as a token of a very small model. So the replies of
    all streams together are limited, and faster tokens share one; urgent events (a first token,
    an end, an error) go out with the next `flush`.
    """

    def __init__(self, hand_over: HandOver, max_replies_per_s: int) -> None:
        """Start empty.

        Args:
            hand_over: Receives all events since the last time; must not block.
            max_replies_per_s: The limit; 0 is none.
        """
        self._hand_over = hand_over
        self._reply_interval_s = 1.0 / max_replies_per_s if max_replies_per_s else 0.0
        self._steps: dict[str, Steps] = {}
        self._failures: dict[str, Failure] = {}
        self._is_urgent = False
        self._handed_over_at = 0.0

    def put(
        self, request_id: str, event: EngineEvent | BackendError, *, is_urgent: bool = False
    ) -> None:
        """Add an event."""
        if isinstance(event, BackendError):
            self._failures[request_id] = Failure.of(event)
        else:
            if (steps := self._steps.get(request_id)) is None:
                steps = self._steps[request_id] = Steps()
            steps.add(event)
        self._is_urgent = self._is_urgent or is_urgent

    def flush(self, streams: int = 0) -> None:
        """Hand over everything, if an event is urgent or so many streams may have a reply again."""
        now = time.monotonic()
        is_due = now >= self._handed_over_at + streams * self._reply_interval_s
        if not (is_due or self._is_urgent) or not (self._steps or self._failures):
            return
        told = Told(self._steps, self._failures)
        self._steps, self._failures, self._is_urgent = {}, {}, False
        self._handed_over_at = now
        self._hand_over(told)
