"""Sets of Unicode characters."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

MAX_CODE_POINT = 0x10FFFF
# Surrogates are not characters: UTF-8 cannot encode them.
_SURROGATES = 0xD800, 0xDFFF

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CharSet:
    """A set of characters; build it with `of`, so that equal sets are equal values.

    Attributes:
        ranges: First and last code points; ascending, neither overlapping nor adjacent.
    """

    ranges: tuple[Range, ...]

    @classmethod
    def of(cls, ranges: Iterable[Range]) -> "CharSet":
        """Return the characters in any of `ranges`."""
        merged: list[Range] = []
        for low, high in sorted(ranges):
            if merged and low <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(merged[-1][1], high))
            else:
                merged.append((low, high))
        return cls(tuple(_without_surrogates(merged)))

    @classmethod
    def single(cls, character: str) -> "CharSet":
        """Return the set of one character."""
        return cls(((ord(character), ord(character)),))

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __contains__(self, character: str) -> bool:
        index = bisect_right(self.ranges, (ord(character), MAX_CODE_POINT)) - 1
        return index >= 0 and ord(character) <= self.ranges[index][1]

    def __invert__(self) -> "CharSet":
        gaps: list[Range] = []
        start = 0
        for low, high in self.ranges:
            if start < low:
                gaps.append((start, low - 1))
            start = high + 1
        if start <= MAX_CODE_POINT:
            gaps.append((start, MAX_CODE_POINT))
        return CharSet.of(gaps)

    def __or__(self, other: "CharSet") -> "CharSet":
        return CharSet.of([*self.ranges, *other.ranges])

    def __and__(self, other: "CharSet") -> "CharSet":
        return self if other == ANY_CHARACTER else ~(~self | ~other)


def _without_surrogates(ranges: list[Range]) -> list[Range]:
    first, last = _SURROGATES
    kept: list[Range] = []
    for low, high in ranges:
        if high < first or last < low:
            kept.append((low, high))
            continue
        if low < first:
            kept.append((low, first - 1))
        if last < high:
            kept.append((last + 1, high))
    return kept


ANY_CHARACTER = ~CharSet(())
