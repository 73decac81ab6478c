"""The queue for slots, and its order: pure policy, without MLX."""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from backend.core.request import Priority
from backend.engine.rows.row import Row

MAX_TIMES_OVERTAKEN = 8
LOOKAHEAD = 16


class AdmissionQueue:
    """Waiting rows: by priority, and within one priority first come, first served.

    The first of a priority may be overtaken: by a higher priority, and by rows that fit into
    memory when it does not. After `MAX_TIMES_OVERTAKEN` times it is the next
    to go in any case.
    """

    def __init__(self) -> None:
        self._lines: dict[Priority, deque[Row]] = {priority: deque() for priority in Priority}
        self._overtaken: dict[Row, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Row]:
        return (row for line in self._lines.values() for row in line)

    def append(self, row: Row) -> None:
        """Queue a row after those of its priority."""
        self._lines[row.request.priority].append(row)

    def put_back(self, row: Row) -> None:
        """Queue a row that has run already before those of its priority."""
        self._lines[row.request.priority].appendleft(row)

    def remove(self, row: Row) -> None:
        """Remove a row; no effect if it does not wait."""
        line = self._lines[row.request.priority]
        if row in line:
            line.remove(row)
        self._overtaken.pop(row, None)

    def take(self, accepts: Callable[[Row], bool]) -> Row | None:
        """Remove and return the first accepted row, if any; later ones are not asked about."""
        heads = [line[0] for line in self._lines.values() if line]
        overdue = max(heads, key=self._times_overtaken, default=None)
        is_overdue = overdue and self._times_overtaken(overdue) >= MAX_TIMES_OVERTAKEN
        candidates = [overdue] if overdue and is_overdue else self._in_order()
        taken = next(filter(accepts, candidates), None)
        if taken is not None:
            self.remove(taken)
            for head in heads:
                if head is not taken:
                    self._overtaken[head] = self._times_overtaken(head) + 1
        return taken

    def check(self) -> None:
        """Raise AssertionError unless exactly the waiting rows have ages."""
        if not self._overtaken.keys() <= set(self):
            raise AssertionError("ages of rows that do not wait")

    def _in_order(self) -> Iterator[Row]:
        return (row for line in self._lines.values() for row in islice(line, LOOKAHEAD))

    def _times_overtaken(self, row: Row) -> int:
        return self._overtaken.get(row, 0)
