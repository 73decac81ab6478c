"""The seconds of passes of several tokens, measured at load and kept current."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

# The weight of the latest pass in the average of its kind, after the first few.
_SHARE = 0.1
# A pass that is slower than its kind by this factor was delayed by something else.
_OUTLIER = 2.0
# After this many passes with drafts, one without measures the saving.
_PLAIN_INTERVAL = 64


@dataclass(slots=True)
class _Kind:
    """Passes of one number of rows and similar width: their time relative to the curve."""

    ratio: float
    count: int = 0

    def observe(self, ratio: float) -> None:
        self.count += 1
        share = max(_SHARE, 1.0 / (1 + self.count))
        self.ratio += share * (min(ratio, _OUTLIER * self.ratio) - self.ratio)


class PassCosts:
    """The cost of a pass by its rows and its tokens per row."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        """Start with a measured curve.

        Args:
            seconds: The seconds of a pass over one row, by its number of tokens.
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
        """Tell whether the cost of a pass without drafts is unknown or out of date."""
        is_guess = rows > 1 and (rows, 0) not in self._kinds
        return is_guess or self._drafted[rows] >= _PLAIN_INTERVAL

    def _ratio(self, rows: int, width: int) -> float:
        """Return the relative time of such passes; an unseen width uses a smaller one."""
        for about in range(_about(width), -1, -1):
            if kind := self._kinds.get((rows, about)):
                return kind.ratio
        return 1.0

    def _on_curve(self, tokens: int) -> float:
        """Return the seconds of `tokens` tokens of one row, interpolated or extrapolated."""
        points = self._curve
        if len(points) == 1:
            return points[0][1]
        right = min(max(bisect_left(points, (tokens, 0.0)), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        return y0 + max(y1 - y0, 0.0) / (x1 - x0) * (tokens - x0)


def _about(width: int) -> int:
    """Return a width's order of magnitude: 0 is a plain pass, then 2, 3 to 4, 5 to 8, and so on."""
    return (width - 1).bit_length()
