"""Bounds the time that drafts lose: an account for each source, in passes without drafts."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable

from backend.engine.drafts.sources import Leave, Source
from backend.engine.rows.row import Row

# A source may lose so many passes before it has saved any.
_GRANT = 8.0
# Savings beyond this are not kept for worse times, and losses beyond it are forgotten.
_MOST = 64.0
# Afterwards all sources together may lose this share of the time.
_SHARE = 0.015
# A step that is slower than expected by this factor was delayed by something else. If it was not,
# the costs of passes soon follow.
_OUTLIER = 2.0


class Budget:
    """The passes that each source may still lose; a source with none left does not draft.

    It counts what steps really took, not what they were expected to take. So the loss is bounded
    even where the measured costs of passes are wrong.
    """

    def __init__(self, sources: Iterable[Source]) -> None:
        """Open an account for each source."""
        self._left = dict.fromkeys(sources, _GRANT)
        self._debts: dict[Row, float] = {}
        self._begin_step()

    def _begin_step(self) -> None:
        self._drafted, self._accepted = Counter[Source](), Counter[Source]()
        self._extra_s = self._writing_s = self._lent_s = 0.0

    def left(self, source: Source) -> float:
        """Return how many passes a source may still lose."""
        return self._left.get(source, 0.0)

    def leave(self, price: Callable[[Source], float]) -> Leave:
        """Return what the sources may do now.

        Args:
            price: Returns the cost of a source's trial, in passes.
        """
        able = [source for source, left in self._left.items() if left > 0.0]
        return Leave(able, [source for source in able if self.affords(source, price(source))])

    def affords(self, source: Source, passes: float) -> bool:
        """Tell whether a source may lose some passes in a trial.

        One that has its whole grant left may lose more, as the price may be wrong.
        """
        return passes <= _MOST and self.left(source) >= min(passes, _GRANT)

    def earn(self, passes: float) -> None:
        """Let the sources lose a share of some time."""
        for source, left in self._left.items():
            if left < _GRANT:
                share = _SHARE * passes / len(self._left)
                self._left[source] = min(left + share, _GRANT)

    def expect(self, extra_s: float, writing_s: float) -> None:
        """Note how much longer the step is likely to take for its drafts.

        Args:
            extra_s: The seconds, including those of the draft model.
            writing_s: The seconds of the draft model.
        """
        self._extra_s += extra_s
        self._writing_s += writing_s

    def count(self, source: Source, drafted: int, accepted: int) -> None:
        """Count the drafted and accepted tokens of a row in the step."""
        self._drafted[source] += drafted
        self._accepted[source] += accepted

    def lend(self, row: Row, seconds: float, plain_s: float) -> None:
        """Let the draft model read a row in the step; it owes the seconds until the row leaves."""
        self._lent_s += seconds
        self._debts[row] = self._debts.get(row, 0.0) + seconds / plain_s

    def follow(self, rows: Collection[Row]) -> None:
        """Collect the debts of rows that have left."""
        for row in self._debts.keys() - rows:
            self._charge(Source.MODEL, self._debts.pop(row))

    def settle(
        self, seconds: float, passes: int, plain_s: float, rows: int, asked: Source | None
    ) -> None:
        """Charge the sources of a step with what it lost, or credit what it saved.

        Args:
            seconds: The step took so long.
            passes: Its rows got the tokens of so many passes without drafts, and accepted ones.
            plain_s: The seconds of a pass without drafts.
            rows: Their number.
            asked: The latest source that a step waited for; it pays for a step without drafts.
        """
        lost_s = self._own_s(seconds, max(passes, 1) * plain_s) - passes * plain_s - self._lent_s
        self._charge(Source.MODEL, self._writing_s / plain_s)
        lost = (lost_s - self._writing_s) / plain_s
        shares = self._drafted or Counter(filter(None, (asked,)))
        for source, count in shares.items():
            saved = self._accepted[source] / rows
            self._charge(source, lost * count / shares.total() - saved)
        self._begin_step()

    def _own_s(self, seconds: float, plain_s: float) -> float:
        """Return the seconds of a step without a delay by something else."""
        return min(seconds, _OUTLIER * (plain_s + self._extra_s + self._lent_s))

    def _charge(self, source: Source, passes: float) -> None:
        if source in self._left:
            self._left[source] = min(max(self._left[source] - passes, -_MOST), _MOST)
