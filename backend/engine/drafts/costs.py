"""The seconds of passes of several tokens, measured at load and kept current."""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping
from itertools import accumulate
from statistics import median_low

# The median of so many passes counts: some are delayed by something else.
_LATEST_PASSES = 5
# After this many passes with drafts, one without measures the saving.
_PLAIN_INTERVAL = 64


class _Kind:
    """Passes of one number of rows and similar width: their time relative to the curve."""

    def __init__(self, guess: float) -> None:
        """Start with a guess, which counts as a pass."""
        self._latest = deque([guess], maxlen=_LATEST_PASSES)
        self.ratio = guess

    def observe(self, ratio: float) -> None:
        """Learn from a pass."""
        self._latest.append(ratio)
        self.ratio = median_low(self._latest)


class PassCosts:
    """The cost of a pass by its rows and its tokens per row."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        """Start with a measured curve.

        Args:
            seconds: The seconds of a pass over one row, by its number of tokens.
        """
        self._curve = _rising(seconds)
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
        """Tell whether the cost of a pass without drafts is a guess or out of date."""
        return (rows, 0) not in self._kinds or self._drafted[rows] >= _PLAIN_INTERVAL

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
        return y0 + (y1 - y0) / (x1 - x0) * (tokens - x0)


def _rising(seconds: Mapping[int, float]) -> list[tuple[int, float]]:
    """Return a curve in order, without delays: fewer tokens never take longer than more."""
    widths = sorted(seconds, reverse=True)
    return list(zip(widths, accumulate(map(seconds.__getitem__, widths), min), strict=True))[::-1]


def _about(width: int) -> int:
    """Return a width's order of magnitude: 0 is a plain pass, then 2, 3 to 4, 5 to 8, and so on."""
    return (width - 1).bit_length()
