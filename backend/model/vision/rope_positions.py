"""The position of each row's next token, for models whose pictures count by their sides.

With M-RoPE a picture of many tokens advances the position only by its longer side, so positions
do not follow from the length of a KV cache.
"""

from collections.abc import Sequence
from typing import Self

import mlx.core as mx


class RopePositions:
    """Stored among the KV caches of a row or a batch, and moves with their rows.

    Attributes:
        counts_only: Nothing here needs to be stored: tokens and media determine it.
        upcoming: The next position of each row.
    """

    counts_only = True

    def __init__(self, upcoming: Sequence[int] = (0,)) -> None:
        self.upcoming = list(upcoming)

    def take(self, count: int) -> mx.array:
        """Return the next positions, [B, count], and advance past them."""
        first = mx.array(self.upcoming, mx.int32)[:, None]
        self.upcoming = [position + count for position in self.upcoming]
        return first + mx.arange(count, dtype=mx.int32) if count > 1 else first

    @classmethod
    def merge(cls, rows: Sequence[Self]) -> Self:
        """Combine several rows."""
        return cls([position for row in rows for position in row.upcoming])

    def extend(self, other: Self) -> None:
        """Append rows."""
        self.upcoming += other.upcoming

    def filter(self, staying: Sequence[int]) -> None:
        """Keep some rows."""
        self.upcoming = [self.upcoming[index] for index in staying]

    def extract(self, index: int) -> "RopePositions":
        """Return a single row."""
        return RopePositions([self.upcoming[index]])

    def empty(self) -> bool:
        """Always true: it never holds keys and values."""
        return True

    @property
    def nbytes(self) -> int:
        """Size of the arrays: zero."""
        return 0

    @property
    def state(self) -> list[mx.array]:
        """Empty: there is nothing to evaluate."""
        return []
