"""The lengths and attention groups of a batch's rows: one ledger for all layers.

Attention over a group costs `overhead + rows * longest`, in units of reading one position of one
row. Rows of similar length share a group, because each group has a fixed cost; rows of different
length do not, because the short ones would pay for the longest.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from backend.engine.kv.spans import Column, Group, PackedPass, Pass, Path

# A change must pay for its copies within this many passes.
HORIZON_PASSES = 64
# Copying a position reads and writes it.
COPY_COST = 3.0
# Maximum padding of a row, at any cost of a group: memory is reserved for it.
MAX_PADDING_TOKENS = 128
MAX_PADDING_SHARE = 1 / 32


def regrouped(
    groups: Iterable[Sequence[int]], lengths: Sequence[int], overhead: float
) -> list[list[int]]:
    """Return the groups that attend at the lowest cost, with as little copying as worthwhile.

    Args:
        groups: The present groups; new rows are separate groups.
        lengths: Positions of each row.
        overhead: Positions that cost as much as one more group.

    Returns:
        Unchanged groups keep the order of their members.
    """
    plan = sorted((list(group) for group in groups), key=lambda g: _longest(g, lengths))
    plan = [part for group in plan for part in _split(group, lengths, overhead)]
    plan.sort(key=lambda g: _longest(g, lengths))
    while len(plan) > 1:
        gains = [_merge_gain(a, b, lengths, overhead) for a, b in pairwise(plan)]
        best = max(range(len(gains)), key=gains.__getitem__)
        if gains[best] <= 0:
            break
        plan[best : best + 2] = [plan[best] + plan[best + 1]]
    return plan


def max_padding(longest: int) -> float:
    """Return the maximum difference of a row from the longest of its group."""
    return max(MAX_PADDING_TOKENS, MAX_PADDING_SHARE * longest)


def _split(group: list[int], lengths: Sequence[int], overhead: float) -> list[list[int]]:
    """Split a group wherever its short rows pay too much for its long ones."""
    ordered = sorted(group, key=lengths.__getitem__)
    copied = COPY_COST * sum(lengths[row] for row in group)
    longest = lengths[ordered[-1]]
    gains = [
        HORIZON_PASSES * (cut * (longest - lengths[ordered[cut - 1]]) - overhead) - copied
        for cut in range(1, len(ordered))
    ]
    if not gains or max(gains) <= 0:
        return [group]
    cut = gains.index(max(gains)) + 1
    parts = _split(ordered[:cut], lengths, overhead), _split(ordered[cut:], lengths, overhead)
    return [*parts[0], *parts[1]]


def _merge_gain(
    short: Sequence[int], long: Sequence[int], lengths: Sequence[int], overhead: float
) -> float:
    """Return the gain of one group instead of two within the horizon."""
    longest = _longest(long, lengths)
    if longest - min(lengths[row] for row in short) > max_padding(longest):
        return -1.0
    padding = len(short) * (longest - _longest(short, lengths))
    copied = COPY_COST * sum(lengths[row] for row in (*short, *long))
    return HORIZON_PASSES * (overhead - padding) - copied


def _longest(group: Iterable[int], lengths: Sequence[int]) -> int:
    return max(lengths[row] for row in group)


# Growing is a copy, and a new size, for which a GPU allocates anew.
MIN_SPARE_TOKENS = 128
SPARE_SHARE = 1 / 16
MAX_SPARE_TOKENS = 256
# With several tokens per pass, lengths drift apart: review groups after this many passes.
PASSES_PER_REVIEW = 256


@dataclass(frozen=True, slots=True)
class Joining:
    """A row that joins."""

    tail: int
    path: Path = ()


@dataclass(frozen=True, slots=True)
class Takeover:
    """Rows that a new group takes over.

    Attributes:
        origin: An old group, or the number of a joining row.
        rows: Indices of rows in the old group; `None` is all of them.
    """

    origin: Group | int
    rows: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """The sources of a group's buffers."""

    group: Group
    sources: tuple[Takeover, ...]

    @property
    def is_kept(self) -> bool:
        """Whether the group is an old one."""
        return self.sources[0].origin is self.group


class Ledger:
    """Lengths and groups of the rows of a batch; belongs to the main thread.

    Attributes:
        lengths: Positions of each row's tail.
        groups: A partition of the rows; those with and without references are separate.
        current: The pass being built, if any.
    """

    def __init__(self, overhead: float) -> None:
        """Start without rows.

        Args:
            overhead: Positions of a row that cost as much as one more group.
        """
        self.lengths: list[int] = []
        self.paths: list[Path] = []
        self.groups: list[Group] = []
        self.current: Pass | None = None
        self._overhead = overhead
        self._counts: Sequence[int] = ()
        self._passes = 0

    @property
    def wants_review(self) -> bool:
        """Whether rows have taken different numbers of tokens for a while."""
        return self._passes >= PASSES_PER_REVIEW

    def begin(self, width: int) -> None:
        """Make room for a pass of `width` tokens per row."""
        self._make_room([width] * len(self.lengths))
        self.current = Pass(self.lengths, self.paths, self.groups, width)

    def begin_packed(self, column: Column) -> PackedPass:
        """Make room for a pass of unlike numbers of tokens, and return it."""
        self._make_room(column.counts)
        self.current = packed = PackedPass(self.lengths, self.paths, self.groups, column)
        return packed

    def begin_latest(self) -> None:
        """Begin a pass that appends nothing, and sees as much as the latest token of each row."""
        before = [length - 1 for length in self.lengths]
        self.current = Pass(before, self.paths, self.groups, 1)

    def _make_room(self, counts: Sequence[int]) -> None:
        self._counts = counts
        for group in self.groups:
            needed = max(self.lengths[row] + counts[row] for row in group.members)
            if needed > group.capacity:
                group.capacity = with_spare(needed)

    def advance(self) -> None:
        """Count the tokens of the pass just built."""
        self.lengths = [n + count for n, count in zip(self.lengths, self._counts, strict=True)]

    def give_back(self, counts: Sequence[int]) -> None:
        """Drop the latest positions of rows: the next pass overwrites them.

        Raises:
            ValueError: A row's tail is too short.
        """
        if any(not 0 <= count <= n for count, n in zip(counts, self.lengths, strict=True)):
            raise ValueError(f"rows of {self.lengths} positions cannot give back {list(counts)}")
        self.lengths = [n - count for count, n in zip(counts, self.lengths, strict=True)]
        self._passes += 1

    def regroup(self, staying: Sequence[int], arrivals: Sequence[Joining]) -> list[Recipe]:
        """Remove rows and append others; return the sources of the groups.

        Args:
            staying: Indices of the rows that stay, in their new order.
        """
        self._passes = 0
        origin = self._origins(staying, len(arrivals))
        self.lengths = [*(self.lengths[row] for row in staying), *(row.tail for row in arrivals)]
        self.paths = [*(self.paths[row] for row in staying), *(row.path for row in arrivals)]
        self.current = None
        recipes = [self._recipe(members, origin) for members in self._plan(origin)]
        self.groups = [recipe.group for recipe in recipes]
        return recipes

    def place(self, row: int) -> tuple[Group, int]:
        """Return the group of a row, and the row's index in its buffers."""
        group = next(group for group in self.groups if row in group.members)
        return group, group.members.index(row)

    def _plan(self, origin: Sequence[tuple[Group | int, int]]) -> list[list[int]]:
        groups = _by_origin(origin)
        plain = [group for group in groups if not self.paths[group[0]]]
        referring = [group for group in groups if self.paths[group[0]]]
        return [
            *regrouped(plain, self.lengths, self._overhead),
            *regrouped(referring, self.lengths, self._overhead),
        ]

    def _origins(self, staying: Sequence[int], arrivals: int) -> list[tuple[Group | int, int]]:
        """Return the old location of each row of the new batch: its group, and its index there."""
        places = {
            row: (group, place) for group in self.groups for place, row in enumerate(group.members)
        }
        return [*(places[row] for row in staying), *((number, 0) for number in range(arrivals))]

    def _recipe(self, members: Sequence[int], origin: Sequence[tuple[Group | int, int]]) -> Recipe:
        sources = []
        for found, rows in groupby(members, key=lambda row: origin[row][0]):
            places = tuple(origin[row][1] for row in rows)
            is_whole = isinstance(found, int) or places == tuple(range(len(found.members)))
            sources.append(Takeover(found, None if is_whole else places))
        only = sources[0]
        if len(sources) == 1 and isinstance(only.origin, Group) and only.rows is None:
            only.origin.members = tuple(members)
            return Recipe(only.origin, (only,))
        longest = max(self.lengths[row] for row in members)
        return Recipe(Group(tuple(members), with_spare(longest)), tuple(sources))


def with_spare(tokens: int) -> int:
    """Return the number of positions to allocate for `tokens`."""
    spare = max(MIN_SPARE_TOKENS, int(tokens * SPARE_SHARE))
    return tokens + min(spare, MAX_SPARE_TOKENS)


def _by_origin(origin: Sequence[tuple[Group | int, int]]) -> list[list[int]]:
    """Return the rows of the new batch by their old group, in the group's order."""
    found: dict[Group | int, list[tuple[int, int]]] = {}
    for row, (source, place) in enumerate(origin):
        found.setdefault(source, []).append((place, row))
    return [[row for _, row in sorted(rows)] for rows in found.values()]
