"""Passes whose rows take unlike numbers of tokens, without padding.

All tokens are in a column [T, 1], which the network takes for rows of one token each: that costs as
much as the tokens. Attention takes the first token of every row together, as in a plain pass, and
the rows with several tokens one by one.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import mlx.core as mx

from backend.engine.kv.spans import Group, Pass, Path, WideRow


class Column:
    """The tokens of all rows, row by row.

    Attributes:
        counts: The number of tokens of each row.
        width: The largest of them.
        firsts: The index of each row's first token.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        """Take the number of tokens of each row, at least one."""
        self.counts = list(counts)
        self.width = max(counts)
        self.firsts = [0, *accumulate(counts)][:-1]

    @property
    def is_even(self) -> bool:
        """Whether all rows have as many tokens."""
        return min(self.counts) == self.width

    @cached_property
    def rows(self) -> mx.array:
        """[T] the row of each token."""
        return mx.array([row for row, count in enumerate(self.counts) for _ in range(count)])

    @cached_property
    def places(self) -> mx.array:
        """[T] the number of tokens of the same row before each."""
        return mx.array([place for count in self.counts for place in range(count)], mx.int32)

    def of(self, array: mx.array) -> mx.array:
        """Return an array [B, width, n], padded, as [T, n]."""
        return array.flatten(0, 1) if self.is_even else array[self.rows, self.places]

    def by_row(self, array: mx.array) -> mx.array:
        """Return an array [T, 1, n] as [B, width, n]; the last token of a row fills its rest."""
        starts = zip(self.firsts, self.counts, strict=True)
        index = [first + min(n, count - 1) for first, count in starts for n in range(self.width)]
        return array[mx.array(index)].reshape(len(self.counts), self.width, -1)


class PackedPass(Pass):
    """The arrays of a packed pass; its spans are those of each row's first token."""

    def __init__(
        self,
        lengths: Sequence[int],
        paths: Sequence[Path],
        groups: Sequence[Group],
        column: Column,
    ) -> None:
        """Take lengths of tails, and references, before the pass."""
        super().__init__(lengths, paths, groups, 1)
        self.offset = self.offset[column.rows] + column.places
        self.offset_after = self.offset + 1
        self._column = column
        members = {row: (group, n) for group in groups for n, row in enumerate(group.members)}
        self.wide = [
            WideRow(*members[row], paths[row], lengths[row], first, count)
            for row, (first, count) in enumerate(zip(column.firsts, column.counts, strict=True))
            if count > 1
        ]

    def first(self, array: mx.array) -> mx.array:
        """Return the first token of each row, [B, heads, 1, n]."""
        return array[self._firsts]

    def joined(self, first: mx.array, wide: Sequence[mx.array]) -> mx.array:
        """Return the outputs of first tokens and of wide rows as [T, heads, 1, n]."""
        columns = [output.transpose(2, 1, 0, 3) for output in wide]
        return mx.concatenate([first, *columns])[self._order]

    @cached_property
    def _firsts(self) -> mx.array:
        return mx.array(self._column.firsts)

    @cached_property
    def _order(self) -> mx.array:
        """[T] the place of each token among the first ones, followed by the wide rows."""
        order, after = [], len(self._column.counts)
        for row, count in enumerate(self._column.counts):
            if count == 1:
                order.append(row)
            else:
                order += range(after, after + count)
                after += count
        return mx.array(order)
