"""The memory of a machine, divided between a user's backends by a directory of locked files.

All compute the same division from the same entries. A growing budget is written before it is used,
and a shrinking one after it has shrunk, both with the directory locked: the sum of all entries
never grows beyond the memory.
"""

import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from backend.config import RESERVE_SHARE
from backend.core.engine_status import BackendStatus, MachineStatus
from backend.engine.messages.protocol import Resize
from common.directories import LockedDirectory

MAX_NAME_CHARS = 256
Bytes = Annotated[int, Meta(ge=0, le=2**56)]


log = logging.getLogger(__name__)


class Entry(Struct, frozen=True, kw_only=True):
    """A backend in the ledger; sizes are in bytes.

    Attributes:
        device: The memory that it shares: one GPU's, or the machine's.
        held: By weights and media, while the model is loaded.
        reserved: By running requests.
        wanted: Additionally, by requests that wait or grow.
        cached: By the part of the prompt cache that no running request uses.
        budget: The limit for requests and prompt cache.
        least: The smallest useful budget.
        wish: The budget without other backends.
    """

    process_id: Bytes
    model: Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
    device: Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
    held: Bytes = 0
    reserved: Bytes = 0
    wanted: Bytes = 0
    cached: Bytes = 0
    budget: Bytes = 0
    least: Bytes = 0
    wish: Bytes = 0
    is_busy: bool = False


class DamagedEntryError(Exception):
    """A file of the ledger does not contain an entry."""


_decoder = msgspec.json.Decoder(Entry)


def encoded(entry: Entry) -> bytes:
    """Return an entry as one line of JSON."""
    return msgspec.json.encode(entry) + b"\n"


def decoded(data: bytes) -> Entry:
    """Return the entry in a file.

    Raises:
        DamagedEntryError: It contains something else.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedEntryError(str(error)) from None


def pool_bytes(usable_bytes: int, entries: Sequence[Entry]) -> int:
    """Return the memory for all KV caches: the part not taken by weights and media."""
    held = sum(entry.held for entry in entries)
    return int(max(usable_bytes - held, 0) * (1.0 - RESERVE_SHARE))


def free_bytes(usable_bytes: int, entries: Sequence[Entry]) -> int:
    """Return the memory outside all budgets; below 0 if weights took memory of budgets."""
    return pool_bytes(usable_bytes, entries) - sum(entry.budget for entry in entries)


def shares(usable_bytes: int, entries: Sequence[Entry]) -> Sequence[int]:
    """Return the target budget of each.

    The memory of running requests comes first, then the demand of waiting ones, then the demand of
    busy backends and the prompt caches of idle ones. If one of these levels cannot be met,
    the backend with the least gets some first.

    Returns:
        In the order of the entries; none is below the smallest useful budget.
    """
    pool = pool_bytes(usable_bytes, entries)
    budgets = [0] * len(entries)
    for limits in zip(*map(_demands, entries), strict=True):
        budgets = _raised(budgets, limits, pool)
    return [max(budget, entry.least) for budget, entry in zip(budgets, entries, strict=True)]


def _demands(entry: Entry) -> tuple[int, ...]:
    """Return a backend's demands, the most pressing first; each includes the previous ones."""
    needed = max(entry.reserved, entry.least)
    wanted = max(entry.reserved + entry.wanted, needed)
    pleasant = entry.wish if entry.is_busy else max(entry.reserved + entry.cached, wanted)
    return tuple(min(demand, entry.wish) for demand in (needed, wanted, pleasant, entry.wish))


def _raised(budgets: Sequence[int], limits: Sequence[int], pool: int) -> list[int]:
    """Raise budgets towards their limits, the lowest first, while there is memory left."""

    def raised_to(level: int) -> list[int]:
        return [
            max(budget, min(limit, level)) for budget, limit in zip(budgets, limits, strict=True)
        ]

    levels = range(max(limits, default=0) + 1)
    below = bisect_right(levels, pool, key=lambda level: sum(raised_to(level)))
    return raised_to(max(below - 1, 0))


LOOK_INTERVAL_S = 0.25
# While a budget is on its way from another backend.
SHORT_INTERVAL_S = 0.05
# Changes of others without effect here are reported no more often.
NEWS_INTERVAL_S = 1.0
# Others hold the lock for less than a millisecond, unless they are stopped.
_LOCK_TIMEOUT_S = 0.2

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Demand:
    """The memory and demand of a session's KV caches, in bytes.

    Attributes:
        reserved: By running requests, including their use of the prompt cache.
        wanted: Additionally, by requests that wait or grow.
        cached: By the rest of the prompt cache.
        answered: The number of the last order carried out.
    """

    reserved: int = 0
    wanted: int = 0
    cached: int = 0
    budget: int = 0
    is_busy: bool = False
    answered: int = 0


class MemoryLedger:
    """The entry of this backend, and a thread that reads the others regularly."""

    def __init__(self, directory: LockedDirectory, entry: Entry, usable_bytes: int) -> None:
        """Create a ledger; nothing is written yet.

        Args:
            directory: Used by nothing else in this process.
        """
        self.directory = directory
        self.entry = entry
        self._usable_bytes = usable_bytes
        self._demand = Demand()
        self._others: Sequence[Entry] = ()
        self._order = Resize(0, 0, 0)
        self._told: Sequence[Entry] = ()
        self._told_at = 0.0
        self._damaged: set[str] = set()
        self._is_failing = False
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._post: Callable[[Resize], None] = lambda _: None

    @classmethod
    def opened(cls, path: Path, entry: Entry, usable_bytes: int) -> Self:
        """Return the ledger in a directory, entered and read once.

        Raises:
            OSError: It cannot be read and written.
        """
        ledger = cls(LockedDirectory(path), entry, usable_bytes)
        try:
            ledger.enter()
        except OSError:
            ledger.close()
            raise
        return ledger

    @property
    def others(self) -> int:
        """The number of other backends on this device, at the last read."""
        return len(self._others)

    @property
    def status(self) -> MachineStatus:
        """The machine at the last read; from any thread."""
        own = _status(self.entry, is_own=True)
        others = (_status(other, is_own=False) for other in self._others)
        return MachineStatus(usable_bytes=self._usable_bytes, backends=(own, *others))

    def enter(self) -> None:
        """Write the entry for the first time, and read the others.

        Raises:
            OSError: The directory cannot be used, or another process holds it.
        """
        with self.directory.exclusive(_LOCK_TIMEOUT_S):
            self._others = self._read()
            self._announce()

    def make_room(self, held: int, timeout_s: float) -> None:
        """Announce weights before they are read, and let the others free memory."""
        self.entry = replace(self.entry, held=held, wish=self.entry.least, is_busy=True)
        deadline = time.monotonic() + timeout_s
        while self._look(self._announce) and self._others and self._is_too_much():
            if time.monotonic() >= deadline or not self._can_give():
                problem = "%d other backends leave too little of %.1f GiB for %.2f GiB of weights"
                log.warning(problem, len(self._others), self._usable_bytes / _GIB, held / _GIB)
                return
            time.sleep(SHORT_INTERVAL_S)

    def begin(self, held: int, wish: int, post: Callable[[Resize], None]) -> None:
        """Divide the memory for the first time; see `start`.

        Args:
            wish: The budget without other backends.
            post: Receives orders for the session; called on the thread that reads the ledger.
        """
        least = min(self.entry.least, wish)
        self.entry = replace(self.entry, held=held, wish=wish, least=least, budget=0, is_busy=False)
        self._demand = Demand(budget=wish)
        self._post = post
        self.look()

    def start(self) -> None:
        """Start the thread that reads the ledger."""
        self._thread = threading.Thread(target=self._run, name="memory-ledger", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove the entry, which frees its memory; a killed backend need not."""
        self._is_closing = True
        self._changed.set()
        if self._thread is not None:
            self._thread.join()
        self.directory.close()

    def note(self, demand: Demand) -> None:
        """Record the session's memory and demand; cheap, from any thread."""
        before, self._demand = self._demand, demand
        old, new = (
            (each.is_busy, each.budget, each.answered, each.wanted > 0) for each in (before, demand)
        )
        if old != new:
            self._changed.set()

    def look(self) -> None:
        """Divide the memory once."""
        self._look(self._divide)

    def _run(self) -> None:
        while not self._is_closing:
            is_growing = self._demand.wanted > 0 and self.entry.budget < self.entry.wish
            self._changed.wait(SHORT_INTERVAL_S if is_growing else LOOK_INTERVAL_S)
            self._changed.clear()
            self.look()

    def _look(self, act: Callable[[], None]) -> bool:
        """Run an action with the directory locked; false if that is not possible now."""
        try:
            with self.directory.exclusive(_LOCK_TIMEOUT_S):
                self._others = self._read()
                act()
        except OSError as error:
            if not self._is_failing:
                log.warning("the ledger of the machine's memory cannot be used now: %s", error)
            self._is_failing = True
            return False
        self._is_failing = False
        return True

    def _read(self) -> Sequence[Entry]:
        """Return the entries of the others on this device."""
        entries = []
        for name, data in self.directory.others().items():
            try:
                entries.append(decoded(data))
            except DamagedEntryError as error:
                if name not in self._damaged:
                    log.warning("%s in the ledger is ignored: %s", name, error)
                self._damaged.add(name)
        return [entry for entry in entries if entry.device == self.entry.device]

    def _announce(self) -> None:
        self.directory.write(encoded(self.entry))

    def _is_too_much(self) -> bool:
        entries = [self.entry, *self._others]
        return free_bytes(self._usable_bytes, entries) < self.entry.least

    def _can_give(self) -> bool:
        entries = [self.entry, *self._others]
        due = shares(self._usable_bytes, entries)
        return any(entry.budget > share for entry, share in zip(entries, due, strict=True))

    def _divide(self) -> None:
        demand = self._demand
        mine = replace(
            self.entry,
            reserved=demand.reserved,
            wanted=demand.wanted,
            cached=demand.cached,
            is_busy=demand.is_busy,
        )
        due, attainable = self._due(mine), self._due(replace(mine, wanted=mine.wish, is_busy=True))
        budget, ordered = self._step(mine, due)
        self.entry = replace(mine, budget=budget)
        self.directory.write(encoded(self.entry))
        self._give(ordered, max(attainable, ordered))

    def _due(self, mine: Entry) -> int:
        """Return the budget due to an entry; a single backend has that of its options."""
        return shares(self._usable_bytes, [mine, *self._others])[0] if self._others else mine.wish

    def _step(self, mine: Entry, due: int) -> tuple[int, int]:
        """Return the budget to write, and the one to order, on the way to the due one."""
        if due >= mine.budget:
            room = max(free_bytes(self._usable_bytes, [mine, *self._others]), 0)
            budget = max(min(due, mine.budget + room), mine.least) if self._others else due
            return budget, budget
        if self._demand.answered < self._order.number:
            return mine.budget, due
        return min(max(due, self._demand.budget), mine.budget), due

    def _give(self, budget: int, attainable: int) -> None:
        """Send the session a changed budget, and occasionally changes elsewhere."""
        before, now = self._order, time.monotonic()
        has_news = self._others != self._told and now >= self._told_at + NEWS_INTERVAL_S
        is_same = (before.budget_bytes, before.attainable_bytes) == (budget, attainable)
        if is_same and not has_news:
            return
        self._told, self._told_at = self._others, now
        self._order = Resize(before.number + 1, budget, attainable)
        self._post(self._order)


def _status(entry: Entry, *, is_own: bool) -> BackendStatus:
    return BackendStatus(
        process_id=entry.process_id,
        model=entry.model,
        held_bytes=entry.held,
        reserved_bytes=entry.reserved,
        wanted_bytes=entry.wanted,
        cached_bytes=entry.cached,
        budget_bytes=entry.budget,
        is_busy=entry.is_busy,
        is_own=is_own,
    )
