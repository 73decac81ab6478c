"""How backends divide the memory of their machine: pure policy.

Everyone computes the same from the same entries, so nobody has to decide for the others.
"""

from bisect import bisect_right
from collections.abc import Sequence

from backend.config import RESERVE_SHARE
from backend.engine.machine.entry import Entry


def pool_bytes(usable_bytes: int, entries: Sequence[Entry]) -> int:
    """Return what there is for the KV caches of all: what their weights and media leave.

    Args:
        usable_bytes: What all of them may take together.
        entries: Of all.
    """
    held = sum(entry.held for entry in entries)
    return int(max(usable_bytes - held, 0) * (1.0 - RESERVE_SHARE))


def free_bytes(usable_bytes: int, entries: Sequence[Entry]) -> int:
    """Return what nobody has for a budget; below 0 where weights have taken what budgets had."""
    return pool_bytes(usable_bytes, entries) - sum(entry.budget for entry in entries)


def shares(usable_bytes: int, entries: Sequence[Entry]) -> Sequence[int]:
    """Return the budget that each should come to.

    What running requests hold comes first, then what requests wait for, then the comfort of those
    that are busy and the prompt caches of the others. Where there is too little for one of these,
    who has the least gets some first.

    Args:
        usable_bytes: What all of them may take together.
        entries: Of all.

    Returns:
        In the order of the entries; none is below the least that is of use.
    """
    pool = pool_bytes(usable_bytes, entries)
    budgets = [0] * len(entries)
    for limits in zip(*map(_demands, entries), strict=True):
        budgets = _raised(budgets, limits, pool)
    return [max(budget, entry.least) for budget, entry in zip(budgets, entries, strict=True)]


def _demands(entry: Entry) -> tuple[int, ...]:
    """Return what a backend asks for, the most pressing first; each includes those before."""
    needed = max(entry.reserved, entry.least)
    wanted = max(entry.reserved + entry.wanted, needed)
    pleasant = entry.wish if entry.is_busy else max(entry.reserved + entry.cached, wanted)
    return tuple(min(demand, entry.wish) for demand in (needed, wanted, pleasant, entry.wish))


def _raised(budgets: Sequence[int], limits: Sequence[int], pool: int) -> list[int]:
    """Raise budgets towards their limits, the lowest first, as far as there is something left."""

    def raised_to(level: int) -> list[int]:
        return [
            max(budget, min(limit, level)) for budget, limit in zip(budgets, limits, strict=True)
        ]

    levels = range(max(limits, default=0) + 1)
    below = bisect_right(levels, pool, key=lambda level: sum(raised_to(level)))
    return raised_to(max(below - 1, 0))
