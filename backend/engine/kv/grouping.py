"""The groups of rows that attend together: pure policy, without MLX.

Attention over a group costs `overhead + rows * longest`, in units of reading one position of one
row. Rows of similar length share a group, because each group has a fixed cost; rows of different
length do not, because the short ones would pay for the longest.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

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
