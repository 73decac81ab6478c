"""The port of rank 0: commands of the server, of the disk's thread and of the ledger's.

The memory ledger learns the loop's use, and its orders come back as commands.
"""

import logging
import os
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from backend.config import (
    LOAD_ROOM_WAIT_S,
    MEDIA_BYTES,
    UNTOLD_MEMORY_SHARE,
)
from backend.core.engine_status import EngineState, EngineStatus
from backend.engine.machine_ledger import MAX_NAME_CHARS, Demand, Entry, MemoryLedger
from backend.engine.messages.codec import Channel
from backend.engine.messages.protocol import (
    Answered,
    DiskNews,
    Load,
    Passing,
    Resize,
    Snapshot,
    Told,
)
from backend.engine.port import Command, Pace, Reportable
from backend.engine.rows.admission import (
    device_name,
    least_kv_bytes,
    usable_bytes,
    working_set_bytes,
)

log = logging.getLogger(__name__)

_NO_LEDGER = (
    "the ledger of the machine's memory, %s, cannot be used: %s. Other backends may be at work "
    "unseen, so this one takes %.1f of %.1f GiB. MLX_BACKEND_LEDGER names another directory for "
    "it; the option memory_ledger:false takes all"
)


class MachineShare:
    """This engine's share of the machine's memory; does nothing without a ledger."""

    def __init__(self) -> None:
        self._ledger: MemoryLedger | None = None
        self._answered = 0

    def join(self, load: Load) -> Load:
        """Open the ledger named by a load, unless its options disable it.

        Returns:
            The load. If the ledger cannot be used, it takes a smaller share of the memory: others
            may be at work unseen.
        """
        options = load.options
        if load.ledger is None or not options.tuning.memory.memory_ledger:
            return load
        usable = usable_bytes(options, working_set_bytes())
        name = (options.model or load.directory.name)[:MAX_NAME_CHARS]
        entry = Entry(
            process_id=os.getpid(),
            model=name,
            device=device_name()[:MAX_NAME_CHARS],
            least=least_kv_bytes(usable),
        )
        try:
            ledger = MemoryLedger.opened(load.ledger, entry, usable)
        except OSError as error:
            share, reason = UNTOLD_MEMORY_SHARE * usable / 2**30, error.strerror or error
            log.warning(_NO_LEDGER, load.ledger, reason, share, usable / 2**30)
            share = UNTOLD_MEMORY_SHARE * options.memory_utilization
            cautious = replace(options, memory_utilization=share)
            return msgspec.structs.replace(load, options=cautious)
        place, others = load.ledger, ledger.others
        count = f"{others} other backend{'' if others == 1 else 's'}" if others else "nobody yet"
        log.info("memory is shared through %s with %s", place, count)
        self._ledger = ledger
        return load

    def make_room(self, weights_bytes: int) -> None:
        """Have other backends free memory before weights are read."""
        if self._ledger is not None:
            self._ledger.make_room(weights_bytes, LOAD_ROOM_WAIT_S)

    def begin(
        self, status: EngineStatus, post: Callable[[Resize], None], *, has_media: bool
    ) -> None:
        """Start dividing the memory."""
        if self._ledger is None:
            return
        parts = status.memory_bytes
        media = MEDIA_BYTES if has_media else 0
        weights = parts["weights"] + parts.get("draft_weights", 0)
        self._ledger.begin(weights + media, parts.get("kv_budget", 0), post)
        self._ledger.start()

    def begin_fixed(self, held: int) -> None:
        """Announce memory that is not divided: ranks of a group keep their budgets."""
        if self._ledger is not None:
            self._ledger.begin(held, 0, lambda _: None)
            self._ledger.start()

    def leave(self) -> None:
        """Release all of it, because this process ends."""
        if self._ledger is not None:
            self._ledger.close()

    def answer(self, order: Resize) -> None:
        """Record that the session is about to carry out an order: the next status is after it."""
        self._answered = order.number

    def note(self, status: EngineStatus) -> EngineStatus:
        """Report a session's memory to the ledger; return the status with the machine."""
        if self._ledger is None:
            return status
        self._ledger.note(_demand(status, self._answered))
        return replace(status, machine=self._ledger.status)


def _demand(status: EngineStatus, answered: int) -> Demand:
    parts = status.memory_bytes
    shared = parts.get("kv_shared", 0)
    return Demand(
        reserved=parts.get("kv_reserved", 0) + shared,
        wanted=parts.get("kv_wanted", 0),
        cached=max(parts.get("prompt_cache", 0) - shared, 0),
        budget=parts.get("kv_budget", 0),
        is_busy=status.state is EngineState.BUSY,
        answered=answered,
    )


STATUS_INTERVAL_S = 0.25


class ServerPort:
    """The port of a loop that is alone, or part of that of the first of several ranks.

    Attributes:
        commands: Those that have arrived; any thread may add one.
    """

    is_shared = False

    def __init__(self, server: Channel, share: MachineShare) -> None:
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
