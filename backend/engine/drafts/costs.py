"""The seconds of passes of several tokens, measured at load and kept current."""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping
from itertools import accumulate
from math import ceil
from statistics import median_low

# The median of so many passes counts: some are delayed by something else.
_LATEST_PASSES = 5
# After this many passes with drafts, one without measures the saving.
_PLAIN_INTERVAL = 64


class _Kind:
    """Passes of one number of rows and about as many tokens: their time relative to the curve."""

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

    def of(self, rows: int, tokens: int) -> float:
        """Return the seconds of a pass over `tokens` tokens of `rows` rows together."""
        return self._ratio(rows, tokens) * self._on_curve(tokens)

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        """Learn from a pass."""
        self._drafted[rows] = self._drafted[rows] + 1 if tokens > rows else 0
        key = rows, _about(rows, tokens)
        if key not in self._kinds:
            self._kinds[key] = _Kind(self._ratio(rows, tokens))
        self._kinds[key].observe(seconds / self._on_curve(tokens))

    def wants_plain(self, rows: int) -> bool:
        """Tell whether the cost of a pass without drafts is a guess or out of date."""
        return (rows, 0) not in self._kinds or self._drafted[rows] >= _PLAIN_INTERVAL

    def _ratio(self, rows: int, tokens: int) -> float:
        """Return the relative time of such passes; an unseen width uses a smaller one."""
        for about in range(_about(rows, tokens), -1, -1):
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


def _about(rows: int, tokens: int) -> int:
    """Return the order of magnitude of tokens per row.

    0 is a plain pass, then at most 2, 3 to 4, 5 to 8, and so on.
    """
    return (ceil(tokens / rows) - 1).bit_length()
