"""Chooses the number of threads for matrix products on a Linux CPU, by what steps really take."""

import logging
from collections import deque
from collections.abc import Iterator
from statistics import median

from common import openblas
from common.process.cores import usable_cores

# To start with, if there are so many cores: few products gain from more.
FIRST_THREADS = 4
# Twice as many threads are taken if steps are faster by the first factor, and given up below the
# second: other work wants the cores as well.
LEAST_GAIN, LEAST_KEPT_GAIN = 1.15, 1.05
# Steps with another number, and with the present one, whose medians are compared.
TRIED_STEPS = 8
# A much slower number is tried no longer than this.
_TELLING_STEPS, _TELLING_FACTOR = 3, 1.5
# Steps between trials; twice as many after each that changes nothing.
FIRST_REST, LONGEST_REST = 16, 2048

log = logging.getLogger(__name__)


class ThreadChoice:
    """The number of threads, as a policy: told the time of steps, it says what to use next.

    Attributes:
        count: For the next step.
    """

    def __init__(self, most: int) -> None:
        """Start with a usual number.

        Args:
            most: The largest number.
        """
        self._most = most
        self._base = self.count = min(most, FIRST_THREADS)
        self._rows = 0
        self._latest: deque[float] = deque(maxlen=TRIED_STEPS)
        self._tried: list[float] = []
        self._rest = self._left = FIRST_REST
        self._goes_up = False

    def observe(self, rows: int, seconds: float) -> None:
        """Learn the time of a step that gave one token to each of some rows."""
        if rows != self._rows:
            self._begin_with(rows)
        if self.count == self._base:
            self._latest.append(seconds)
            self._left -= 1
            if self._left <= 0 and len(self._latest) == TRIED_STEPS:
                self._try_another()
        else:
            self._tried.append(seconds)
            self._judge()

    def _begin_with(self, rows: int) -> None:
        """Forget times of steps with other numbers of rows, which cannot be compared."""
        self._rows, self.count = rows, self._base
        self._latest.clear()
        self._tried.clear()

    def _try_another(self) -> None:
        """Use another number for some steps: more and fewer in turn."""
        self._goes_up = not self._goes_up
        others = [n for n in self._neighbours() if n != self._base]
        if others:
            self.count = others[0]
        self._left = self._rest

    def _neighbours(self) -> Iterator[int]:
        more, fewer = min(2 * self._base, self._most), max(self._base // 2, 1)
        yield from (more, fewer) if self._goes_up else (fewer, more)

    def _judge(self) -> None:
        """Compare, once that can be told."""
        usual, tried = median(self._latest), median(self._tried)
        is_telling = len(self._tried) >= _TELLING_STEPS and tried > _TELLING_FACTOR * usual
        if len(self._tried) < TRIED_STEPS and not is_telling:
            return
        if self._is_better(usual, tried):
            self._base, self._rest = self.count, FIRST_REST
            log.info("threads for each matrix product: %d of at most %d", self._base, self._most)
        else:
            self._rest = min(2 * self._rest, LONGEST_REST)
        self._left = self._rest
        self._begin_with(self._rows)

    def _is_better(self, usual: float, tried: float) -> bool:
        """Tell whether the tried number is to be kept, by the seconds of steps."""
        is_more = self.count > self._base
        return usual >= LEAST_GAIN * tried if is_more else tried < LEAST_KEPT_GAIN * usual


class ProductThreads:
    """Sets the number of threads of this process; requires OpenBLAS."""

    def __init__(self, most: int) -> None:
        """Set the first number.

        Args:
            most: The maximum.
        """
        self._choice = ThreadChoice(most)
        self._count = 0
        self.change()
        log.info("threads for each matrix product: %d of at most %d", self._count, most)

    @property
    def wants_change(self) -> bool:
        """Whether to call `change` before the next pass, when nothing is being computed."""
        return self._choice.count != self._count

    def change(self) -> None:
        """Use the due number; no product may be running."""
        self._count = self._choice.count
        openblas.set_threads(self._count)

    def observe(self, rows: int, seconds: float) -> None:
        """Learn the time of a step; one before a due change was not with the due number."""
        if not self.wants_change:
            self._choice.observe(rows, seconds)


def choose_threads(limit: int | None) -> ProductThreads | None:
    """Begin to choose the threads of this process.

    Args:
        limit: The maximum; `None` is as many as there are cores.

    Returns:
        `None` without OpenBLAS, and if the environment sets more than one thread.
    """
    if not openblas.has_openblas() or openblas.threads() > 1:
        return None
    cores = usable_cores()
    return ProductThreads(min(cores, limit) if limit else cores)
