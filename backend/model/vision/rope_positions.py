"""Where the next token of each row stands for models whose pictures count by their sides.

With M-RoPE a picture of many tokens advances the position by its longer side only, so positions
do not follow from how much a KV cache holds.
"""

from collections.abc import Sequence
from typing import Self

import mlx.core as mx


class RopePositions:
    """Rides among the KV caches of a row, or of a batch, and moves with their rows.

    Attributes:
        counts_only: Nothing here has to be stored: tokens and media tell it all.
        upcoming: The next position of each row.
    """

    counts_only = True

    def __init__(self, upcoming: Sequence[int] = (0,)) -> None:
        self.upcoming = list(upcoming)

    def take(self, count: int) -> mx.array:
        """Return the next positions, [B, count], and go on behind them."""
        first = mx.array(self.upcoming, mx.int32)[:, None]
        self.upcoming = [position + count for position in self.upcoming]
        return first + mx.arange(count, dtype=mx.int32) if count > 1 else first

    @classmethod
    def merge(cls, rows: Sequence[Self]) -> Self:
        """Make one of several rows."""
        return cls([position for row in rows for position in row.upcoming])

    def extend(self, other: Self) -> None:
        """Let rows join behind these."""
        self.upcoming += other.upcoming

    def filter(self, staying: Sequence[int]) -> None:
        """Keep some rows."""
        self.upcoming = [self.upcoming[index] for index in staying]

    def extract(self, index: int) -> "RopePositions":
        """Return one row by itself."""
        return RopePositions([self.upcoming[index]])

    def empty(self) -> bool:
        """Hold no keys and values, ever."""
        return True

    @property
    def nbytes(self) -> int:
        """Size of the arrays: there are none."""
        return 0

    @property
    def state(self) -> list[mx.array]:
        """Nothing to evaluate."""
        return []
