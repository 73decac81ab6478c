"""The open requests and the order of admission, prefill, decoding and pausing: without MLX.

A row is fetching (its prefix is being read from disk), waiting (no slot yet), prefilling (a slot,
its prompt entering the KV cache) or active (a slot, decoding). Rows whose prefill is done
stay prefilling until the batch has room.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from backend.core.engine_status import RequestPhase
from backend.core.request import Priority
from backend.engine.rows.row import Row

MAX_TIMES_PASSED_OVER = 8
MAX_TIMES_OVERTAKEN = 8
LOOKAHEAD = 16
# Prompts with this many further tokens in common compute them once.
MIN_COMMON_TOKENS = 16


class AdmissionQueue:
    """Waiting rows: by priority, and within one priority first come, first served.

    The first of a priority may be overtaken: by a higher priority, and by rows that fit into
    memory when it does not. After `MAX_TIMES_OVERTAKEN` times it is the next
    to go in any case.
    """

    def __init__(self) -> None:
        self.count = 0
        self._lines: dict[Priority, deque[Row]] = {priority: deque() for priority in Priority}
        self._overtaken = Counter[Row]()

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Row]:
        return (row for line in self._lines.values() for row in line)

    def append(self, row: Row) -> None:
        """Queue a row after those of its priority."""
        self._lines[row.params.priority].append(row)
        self.count += 1

    def put_back(self, row: Row) -> None:
        """Queue a row that has run already before those of its priority."""
        self._lines[row.params.priority].appendleft(row)
        self.count += 1

    def remove(self, row: Row) -> None:
        """Remove a row; no effect if it does not wait."""
        line = self._lines[row.params.priority]
        if row in line:
            line.remove(row)
            self.count -= 1
        self._overtaken.pop(row, None)

    def take(self, accepts: Callable[[Row], bool]) -> Row | None:
        """Remove and return the first accepted row, if any; later ones are not asked about."""
        heads = [line[0] for line in self._lines.values() if line]
        overdue = max(heads, key=self._overtaken.__getitem__, default=None)
        is_overdue = overdue and self._overtaken[overdue] >= MAX_TIMES_OVERTAKEN
        in_order = (row for line in self._lines.values() for row in islice(line, LOOKAHEAD))
        candidates = [overdue] if overdue and is_overdue else in_order
        taken = next(filter(accepts, candidates), None)
        if taken is not None:
            self.remove(taken)
            self._overtaken.update(head for head in heads if head is not taken)
        return taken

    def check(self) -> None:
        """Raise AssertionError unless exactly the waiting rows have ages."""
        if not self._overtaken.keys() <= set(self):
            raise AssertionError("ages of rows that do not wait")


class Scheduler:
    """Knows every open request, and its phase; belongs to the main thread."""

    def __init__(self, *, max_slots: int, max_active: int) -> None:
        """Start empty.

        Args:
            max_active: Rows that may decode together; 1 for a model that cannot be batched.
        """
        self.max_slots = max_slots
        self.max_active = max_active
        self.fetching: list[Row] = []
        self.waiting = AdmissionQueue()
        self.prefilling: list[Row] = []
        self.active: list[Row] = []
        self._open: dict[str, Row] = {}
        self._passed_over = Counter[Row]()
        self._chunks_by_length = 0

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do; fetching rows wait for the disk."""
        return not (self.waiting or self.prefilling or self.active)

    @property
    def slots_taken(self) -> int:
        """Rows that hold a slot."""
        return len(self.prefilling) + len(self.active)

    @property
    def free_slots(self) -> int:
        """The number of free slots for further rows."""
        return self._slot_limit - self.slots_taken

    def rows(self) -> list[Row]:
        """Return every row, in the order of submission."""
        return list(self._open.values())

    def find(self, request_id: str) -> Row | None:
        """Return an open request, if it is one."""
        return self._open.get(request_id)

    def phases(self) -> Mapping[RequestPhase, Sequence[Row]]:
        """Return every row by its phase."""
        return {
            RequestPhase.WAITING: [*self.fetching, *self.waiting],
            RequestPhase.PREFILLING: self.prefilling,
            RequestPhase.ACTIVE: self.active,
        }

    @property
    def waiting_count(self) -> int:
        """The number of waiting and fetching rows."""
        return len(self.fetching) + len(self.waiting)

    def await_fetch(self, row: Row) -> None:
        """Let a new row wait until its prefix is read from disk."""
        self._open[row.request_id] = row
        self.fetching.append(row)

    def end_fetch(self, row: Row) -> None:
        """Let a fetching row wait for a slot; no effect on any other."""
        if row in self.fetching:
            self.fetching.remove(row)
            self.enqueue(row)

    def enqueue(self, row: Row) -> None:
        """Let a row wait for a slot."""
        self._open[row.request_id] = row
        self.waiting.append(row)

    def admit(self, reserve: Callable[[Row], bool] = lambda _: True) -> list[Row]:
        """Give free slots to waiting rows, in order, and return those rows.

        Args:
            reserve: Reserves memory for a row; false if there is none.
        """
        admitted = []
        while self.free_slots > 0 and (row := self.waiting.take(reserve)):
            self.prefilling.append(row)
            admitted.append(row)
        return admitted

    @property
    def _slot_limit(self) -> int:
        """The number of slots; one if rows cannot decode together."""
        return 1 if self.max_active == 1 else self.max_slots

    def next_prefill(self) -> Row | None:
        """Return the row whose chunk runs next: by priority, then the one with the least left.

        Occasionally it is the one passed over most often, so that no stream of short or
        important prompts starves another.
        """
        candidates = [row for row in self.prefilling if row.prefill_left > 0]
        if not candidates:
            return None
        chosen = self._starving(candidates)
        if chosen is None:
            self._chunks_by_length += 1
            chosen = min(candidates, key=lambda row: (row.params.priority, row.prefill_left))
        else:
            self._chunks_by_length = 0
        self._passed_over.update(candidates)
        self._passed_over[chosen] = 0
        return chosen

    def companions(self, row: Row) -> list[Row]:
        """Return the rows whose prompts may share a pass with a row's, shortest first.

        Rows with the same first tokens are excluded: the second reuses the first's result.
        """
        if not _may_share(row):
            return []
        chosen = [row]
        for other in sorted(self.prefilling, key=lambda each: each.prefill_left):
            may_join = other is not row and other.prefill_left > 0 and _may_share(other)
            if may_join and not any(_begin_alike(other, each) for each in chosen):
                chosen.append(other)
        return chosen[1:]

    def activate(self) -> list[Row]:
        """Activate rows whose prefill is done, as far as there is room."""
        room = self.max_active - len(self.active)
        joining = [row for row in self.prefilling if row.prefill_left == 0][:room]
        for row in joining:
            self.prefilling.remove(row)
            self._passed_over.pop(row, None)
        self.active.extend(joining)
        return joining

    def deactivate(self) -> list[Row]:
        """Return every active row to prefilling, after its KV cache was lost."""
        rows, self.active = self.active, []
        self.prefilling.extend(rows)
        return rows

    def yielding(self) -> Row | None:
        """Return the running row to pause first: the latest of the lowest priority."""
        running = (row for row in (*self.prefilling, *self.active) if not row.is_paused)
        return max(running, key=lambda row: (row.params.priority, row.submitted_at), default=None)

    def put_back(self, row: Row) -> None:
        """Let a running row wait again; its slot is free."""
        self._release(row)
        self.waiting.put_back(row)

    def remove(self, row: Row) -> None:
        """Forget a row in any phase; its slot is free."""
        self._release(row)
        self._open.pop(row.request_id, None)

    def _release(self, row: Row) -> None:
        for place in (self.fetching, self.prefilling, self.active):
            if row in place:
                place.remove(row)
        self.waiting.remove(row)
        self._passed_over.pop(row, None)

    def check(self) -> None:
        """Raise AssertionError unless every row has one phase, within the limits."""
        rows = [*self.fetching, *self.waiting, *self.prefilling, *self.active]
        if len(set(rows)) != len(rows):
            raise AssertionError("a row stands in two places")
        if set(rows) != set(self._open.values()):
            raise AssertionError("a row without a phase, or one that is no open request")
        if self.slots_taken > self.max_slots or len(self.active) > self.max_active:
            raise AssertionError("more rows than slots")
        if not set(self._passed_over) <= set(self.prefilling):
            raise AssertionError("ages of rows that do not prefill")
        self.waiting.check()

    def _starving(self, candidates: Sequence[Row]) -> Row | None:
        """Return the row passed over too often, unless another such row has just had a turn."""
        longest = max(candidates, key=self._passed_over.__getitem__)
        is_due = self._chunks_by_length >= MAX_TIMES_PASSED_OVER
        is_starving = self._passed_over[longest] >= MAX_TIMES_PASSED_OVER
        return longest if is_due and is_starving else None


def _may_share(row: Row) -> bool:
    return row.may_share_passes and not row.request.prompt.media


def _begin_alike(one: Row, other: Row) -> bool:
    """Tell whether rows share more tokens than both have computed."""
    start = max(one.fed, other.fed)
    stop = start + MIN_COMMON_TOKENS
    return one.token_ids[:stop] == other.token_ids[:stop]
