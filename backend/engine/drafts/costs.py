"""Seconds that passes of several tokens take, as measured at load and kept current."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

# Of the latest pass in the average of its kind, once there have been some.
_SHARE = 0.1
# A pass that took so many times as long as its kind did not take it for its tokens.
_OUTLIER = 2.0
# Passes with drafts until one without is computed: what drafts save is measured by it.
_PLAIN_INTERVAL = 64


@dataclass(slots=True)
class _Kind:
    """Passes of one number of rows and about one width: how long they take against the curve."""

    ratio: float
    count: int = 0

    def observe(self, ratio: float) -> None:
        self.count += 1
        share = max(_SHARE, 1.0 / (1 + self.count))
        self.ratio += share * (min(ratio, _OUTLIER * self.ratio) - self.ratio)


class PassCosts:
    """What a pass costs by its rows and by its tokens for each."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        """Start with a curve that was measured.

        Args:
            seconds: Of passes by how many tokens they take of one row.
        """
        self._curve = sorted(seconds.items())
        self._kinds: dict[tuple[int, int], _Kind] = {}
        self._drafted = Counter[int]()

    def of(self, rows: int, width: int) -> float:
        """Return the seconds of a pass over `rows` rows of `width` tokens each."""
        return self._ratio(rows, width) * self._on_curve(rows * width)

    def observe(self, rows: int, width: int, seconds: float) -> None:
        """Learn from a pass."""
        self._drafted[rows] = self._drafted[rows] + 1 if width > 1 else 0
        key = rows, _about(width)
        if key not in self._kinds:
            self._kinds[key] = _Kind(self._ratio(rows, width))
        self._kinds[key].observe(seconds / self._on_curve(rows * width))

    def wants_plain(self, rows: int) -> bool:
        """Tell whether it is unknown what a pass without drafts costs, or known from long ago."""
        is_guess = rows > 1 and (rows, 0) not in self._kinds
        return is_guess or self._drafted[rows] >= _PLAIN_INTERVAL

    def _ratio(self, rows: int, width: int) -> float:
        """Return how long such passes take against the curve; a width not seen is like others."""
        for about in range(_about(width), -1, -1):
            if kind := self._kinds.get((rows, about)):
                return kind.ratio
        return 1.0

    def _on_curve(self, tokens: int) -> float:
        """Return the measured seconds of so many tokens of one row; beyond the last they grow."""
        points = self._curve
        if len(points) == 1:
            return points[0][1]
        right = min(max(bisect_left(points, (tokens, 0.0)), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        return y0 + max(y1 - y0, 0.0) / (x1 - x0) * (tokens - x0)


def _about(width: int) -> int:
    """Return a width's order of magnitude: 0 is a plain pass, then 2, 3 to 4, 5 to 8, and so on."""
    return (width - 1).bit_length()
