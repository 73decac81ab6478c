"""The port of rank 0: commands of the server, of the disk's thread and of the ledger's."""

import queue
import time
from collections.abc import Sequence

from backend.core.status import EngineStatus
from backend.engine.leading.machine_share import MachineShare
from backend.engine.messages.channel import Channel
from backend.engine.messages.commands import DiskNews, Resize
from backend.engine.messages.protocol import Answered, Passing, Snapshot, Told
from backend.engine.port import Command, Pace, Reportable

STATUS_INTERVAL_S = 0.25


class ServerPort:
    """The port of a loop that is alone, or part of that of the first of several ranks.

    Attributes:
        commands: Those that have arrived; any thread may add one.
    """

    is_shared = False

    def __init__(self, server: Channel, share: MachineShare) -> None:
        """Create a port.

        Args:
            server: Takes events, results and statuses.
            share: Told about the memory in every status, and about each order carried out.
        """
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._server = server
        self._share = share
        self._status_due_at = 0.0

    def post(self, news: DiskNews | Resize) -> None:
        """Take a message of another thread, which comes back as a command."""
        self.commands.put(news)

    def receive(self, *, waits: bool, timeout_s: float | None) -> Sequence[Command]:
        """Return the commands that have arrived, after waiting for one if there is no work."""
        received: list[Command] = []
        try:
            while True:
                command = self.commands.get(block=waits, timeout=timeout_s)
                received.append(command)
                waits = False
                if isinstance(command, Resize):
                    self._share.answer(command)
        except queue.Empty:
            return received

    def agree(self, pace: Pace | None) -> Pace | None:
        """Return this rank's own pace."""
        return pace

    def note_pass(self, request_ids: Sequence[str], /, *, has_job: bool = False) -> None:
        """Tell the server about the next pass."""
        self._server.send(Passing(request_ids, has_job))

    def hand_over(self, told: Told, /) -> None:
        """Send events."""
        self._server.send(told)

    def answer(self, results: Sequence[tuple[int, object]], /) -> None:
        """Send results."""
        for number, result in results:
            self._server.send(Answered.of(number, result))

    def report(self, loop: Reportable, *, is_idle: bool) -> None:
        """Send a status regularly, and whenever there is nothing left to do."""
        if is_idle or time.monotonic() >= self._status_due_at:
            self.send_status(loop)

    def send_status(self, loop: Reportable) -> None:
        """Send a status now."""
        self._status_due_at = time.monotonic() + STATUS_INTERVAL_S
        self._server.send(Snapshot(self.status(loop)))

    def status(self, loop: Reportable) -> EngineStatus:
        """Return the status of the loop, with its share of the machine."""
        return self._share.note(loop.status())
