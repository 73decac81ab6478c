"""Positions that rows write and see in one forward pass: computed once, used by all layers.

In a packed pass all tokens are in a column [T, 1], which the network takes for rows of one token
each: that costs as much as the tokens, without padding. Attention takes the first token of every
row together, as in a plain pass, and the rows with several tokens one by one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

import mlx.core as mx

Index: TypeAlias = slice | mx.array
"""Selects rows of an array [B, ...]."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The first positions of an array of the prompt cache.

    Attributes:
        source: Identifies the array; the same in all layers.
    """

    source: int
    tokens: int


Path: TypeAlias = tuple[Reference, ...]
"""The first positions of a row, in order."""


@dataclass(eq=False, slots=True)
class Group:
    """Rows whose tails lie in one buffer [rows, heads, capacity, width] per layer.

    Attributes:
        members: Their indices in the batch, in the order of the buffer.
    """

    members: tuple[int, ...]
    capacity: int


class Span:
    """The positions that a group's rows write, and see of their tails.

    Attributes:
        take: Selects its rows in an array of the batch.
    """

    def __init__(self, group: Group, lengths: Sequence[int], width: int) -> None:
        self.group = group
        self.take = index_of(group.members)
        self._lengths = [lengths[row] for row in group.members]
        self._width = width
        self.longest = max(self._lengths) + width

    @cached_property
    def places(self) -> mx.array:
        """The written positions, [rows, 1, width, 1]."""
        first = mx.array(self._lengths, mx.int32)[:, None, None, None]
        return first + mx.arange(self._width, dtype=mx.int32)[:, None]

    @cached_property
    def mask(self) -> mx.array | str | None:
        """The mask of the queries, as upstream's attention takes it."""
        if len(set(self._lengths)) > 1:
            return self.visible(None)
        return "causal" if self._width > 1 else None

    @cached_property
    def array_mask(self) -> mx.array | None:
        """The same as an array [rows, 1, width, longest]; `None` is all."""
        return None if self.mask is None else self.visible(None)

    def visible(self, window: int | None) -> mx.array:
        """Return the positions visible to each query, [rows, 1, width, longest].

        Args:
            window: Number of latest positions; `None` is all.
        """
        positions = mx.arange(self.longest, dtype=mx.int32)
        seen = positions <= self.places
        return seen if window is None else seen & (positions > self.places - window)


class SharedSpan:
    """Positions of the prompt cache, and the rows that start with them.

    Attributes:
        take: Selects the rows in an array of the batch.
        tokens: Number of positions read, the maximum over the rows.
        places: For each row with references, its index among those of this span; one more is a
            row without. `None` if all of them share it, in order.
    """

    def __init__(
        self, source: int, start: int, users: Mapping[int, int], everyone: Sequence[int]
    ) -> None:
        """Take the rows.

        Args:
            users: Number of these positions in each row, by its index in the batch.
            everyone: The rows with references, in order.
        """
        self.source = source
        self.take = index_of(list(users))
        self.tokens = max(users.values())
        self._start = start
        self._counts = list(users.values())
        order = {row: place for place, row in enumerate(users)}
        places = [order.get(row, len(order)) for row in everyone]
        self.places = None if places == list(range(len(order))) else mx.array(places)

    @cached_property
    def mask(self) -> mx.array | None:
        """The positions of each row, [rows, 1, 1, tokens]; `None` is all."""
        if min(self._counts) == self.tokens:
            return None
        positions = mx.arange(self.tokens, dtype=mx.int32)
        return positions < mx.array(self._counts, mx.int32)[:, None, None, None]

    def visible(self, window: int, latest: mx.array) -> mx.array:
        """Return the positions visible to each query, [rows, 1, width, tokens].

        Args:
            latest: [B, width] the position of each query of the batch.
        """
        positions = self._start + mx.arange(self.tokens, dtype=mx.int32)
        seen = positions > latest[self.take][:, None, :, None] - window
        return seen if self.mask is None else seen & self.mask


@dataclass(frozen=True, eq=False, slots=True)
class WideRow:
    """A row that takes several tokens in a packed pass.

    Attributes:
        length: Positions of its tail before the pass.
        first: Index of its first token in the column.
    """

    group: Group
    place: int
    path: Path
    length: int
    first: int
    count: int
    _masks: dict[tuple[int, int, int | None], mx.array] = field(default_factory=dict)

    def queries(self, array: mx.array) -> mx.array:
        """Return its part of an array [T, heads, 1, n] as [1, heads, count, n]."""
        return array[self.first : self.first + self.count].transpose(2, 1, 0, 3)

    @property
    def causal(self) -> mx.array:
        """The positions of its tail visible to each token, [1, 1, count, length + count]."""
        return self._visible(0, self.length + self.count, None)

    def visible(self, start: int, stop: int, window: int | None) -> mx.array | None:
        """Return the positions that each token sees, [1, 1, count, stop - start]; `None` is all.

        Args:
            start: The first position, counted from the tail: negative before it.
            stop: The position after the last.
            window: Number of latest positions; `None` is all.
        """
        if window is None and stop <= self.length:
            return None
        return self._visible(start, stop, window)

    def _visible(self, start: int, stop: int, window: int | None) -> mx.array:
        """Return the same as an array, which all layers share."""
        key = start, stop, window
        if key not in self._masks:
            latest = mx.arange(self.length, self.length + self.count, dtype=mx.int32)[:, None]
            positions = mx.arange(start, stop, dtype=mx.int32)
            seen = positions <= latest
            if window is not None:
                seen &= positions > latest - window
            self._masks[key] = seen[None, None]
        return self._masks[key]


class Places:
    """Where the positions lie that a single query of each row sees.

    It is `backend.model.device.Pieces` before a layer puts in its arrays.

    Attributes:
        sources: Groups of tails, and references by their source.
    """

    def __init__(
        self, lengths: Sequence[int], paths: Sequence[Path], groups: Sequence[Group]
    ) -> None:
        """Take lengths of tails with the query's own position."""
        shared = {reference.source: None for path in paths for reference in path}
        self.sources: list[Group | int] = [*groups, *shared]
        self.longest = max(_tokens(path) + n for path, n in zip(paths, lengths, strict=True))
        in_order = len(self.sources) == 1 and list(groups[0].members) == list(range(len(lengths)))
        self.is_even = in_order and min(lengths) == self.longest
        self.table = mx.array(list(self._rows(lengths, paths, groups)), mx.int32)

    def _rows(
        self, lengths: Sequence[int], paths: Sequence[Path], groups: Sequence[Group]
    ) -> Iterable[list[tuple[int, int, int]]]:
        number = {source: n for n, source in enumerate(self.sources)}
        tails = {row: (number[group], n) for group in groups for n, row in enumerate(group.members)}
        deepest = max(map(len, paths)) + 1
        for row, path in enumerate(paths):
            pieces = [(number[each.source], 0, each.tokens) for each in path]
            pieces.append((*tails[row], lengths[row]))
            yield pieces + [(0, 0, 0)] * (deepest - len(pieces))


class Pass:
    """The arrays that all layers use in one forward pass.

    Attributes:
        offset: Positions before each row of the network, which is a row of the batch.
        offset_after: The same after the pass.
        plain: Of groups without references.
        wide: Rows that take more tokens than the spans have.
    """

    wide: Sequence[WideRow] = ()

    def __init__(
        self, lengths: Sequence[int], paths: Sequence[Path], groups: Sequence[Group], width: int
    ) -> None:
        """Take lengths of tails, and references, before the pass."""
        self.width = width
        self._given = lengths, paths, groups
        before = [_tokens(path) + n for path, n in zip(paths, lengths, strict=True)]
        self._before = mx.array(before, mx.int32)
        self.offset, self.offset_after = self._before, self._before + width
        self.spans = [Span(group, lengths, width) for group in groups]
        self.plain = [span for span in self.spans if not paths[span.group.members[0]]]
        self.referring = [span for span in self.spans if paths[span.group.members[0]]]
        everyone = [row for span in self.referring for row in span.group.members]
        self.shared = list(_shared(paths, everyone))
        order = [row for span in (*self.plain, *self.referring) for row in span.group.members]
        self._inverse = index_of(sorted(range(len(order)), key=order.__getitem__))

    @cached_property
    def seen(self) -> Places:
        """The positions that the first query of each row sees."""
        lengths, paths, groups = self._given
        return Places([length + 1 for length in lengths], paths, groups)

    @cached_property
    def latest(self) -> mx.array:
        """The position of each query, [B, width]."""
        return self._before[:, None] + mx.arange(self.width, dtype=mx.int32)

    def first(self, array: mx.array) -> mx.array:
        """Return the tokens of the spans, [B, heads, width, n], from all tokens."""
        return array

    def joined(self, first: mx.array, wide: Sequence[mx.array]) -> mx.array:
        """Return the outputs of all tokens from those of the spans and of the wide rows."""
        del wide
        return first

    def in_order(self, outputs: Sequence[mx.array]) -> mx.array:
        """Join arrays of groups without and with references, in the order of the batch."""
        joined = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        return joined if isinstance(self._inverse, slice) else joined[self._inverse]


def index_of(rows: Sequence[int]) -> Index:
    """Return an index of these rows, without a copy if they are adjacent."""
    first, last = rows[0], rows[-1]
    if list(rows) == list(range(first, last + 1)):
        return slice(first, last + 1)
    return mx.array(rows)


def _shared(paths: Sequence[Path], everyone: Sequence[int]) -> Iterable[SharedSpan]:
    users: dict[tuple[int, int], dict[int, int]] = {}
    for row in everyone:
        start = 0
        for reference in paths[row]:
            users.setdefault((reference.source, start), {})[row] = reference.tokens
            start += reference.tokens
    for (source, start), counts in users.items():
        yield SharedSpan(source, start, counts, everyone)


def _tokens(path: Path) -> int:
    return sum(reference.tokens for reference in path)


class Column:
    """The tokens of all rows, row by row."""

    def __init__(self, counts: Sequence[int]) -> None:
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
        self, lengths: Sequence[int], paths: Sequence[Path], groups: Sequence[Group], column: Column
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
