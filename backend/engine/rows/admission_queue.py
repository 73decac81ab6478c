"""Who waits for a slot, and in which order: pure policy, without MLX."""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from backend.core.request import Priority
from backend.engine.rows.row import Row

MAX_TIMES_OVERTAKEN = 8
LOOKAHEAD = 16


class AdmissionQueue:
    """Rows that wait: by priority, and of one priority first come first served.

    The first of a priority may be overtaken: by a higher priority, and by rows that fit into
    memory where it does not. When that has happened `MAX_TIMES_OVERTAKEN` times it is the next
    to go, whatever else there is.
    """

    def __init__(self) -> None:
        self._lines: dict[Priority, deque[Row]] = {priority: deque() for priority in Priority}
        self._overtaken: dict[Row, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Row]:
        return (row for line in self._lines.values() for row in line)

    def append(self, row: Row) -> None:
        """Let a row wait after those of its priority."""
        self._lines[row.request.priority].append(row)

    def put_back(self, row: Row) -> None:
        """Let a row that has run already wait before those of its priority."""
        self._lines[row.request.priority].appendleft(row)

    def remove(self, row: Row) -> None:
        """Take a row out; no effect when it does not wait."""
        line = self._lines[row.request.priority]
        if row in line:
            line.remove(row)
        self._overtaken.pop(row, None)

    def take(self, accepts: Callable[[Row], bool]) -> Row | None:
        """Take out the first row that is accepted, if one is; none after it is asked about."""
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
        """Raise AssertionError unless just waiting rows have ages."""
        if not self._overtaken.keys() <= set(self):
            raise AssertionError("ages of rows that do not wait")

    def _in_order(self) -> Iterator[Row]:
        return (row for line in self._lines.values() for row in islice(line, LOOKAHEAD))

    def _times_overtaken(self, row: Row) -> int:
        return self._overtaken.get(row, 0)
