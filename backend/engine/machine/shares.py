"""The division of a machine's memory between backends: pure policy.

All compute the same from the same entries, so no backend decides for the others.
"""

from bisect import bisect_right
from collections.abc import Sequence

from backend.config import RESERVE_SHARE
from backend.engine.machine.entry import Entry


def pool_bytes(usable_bytes: int, entries: Sequence[Entry]) -> int:
    """Return the memory for all KV caches: the part not taken by weights and media.

    Args:
        usable_bytes: The memory for all of them together.
        entries: Of all.
    """
    held = sum(entry.held for entry in entries)
    return int(max(usable_bytes - held, 0) * (1.0 - RESERVE_SHARE))


def free_bytes(usable_bytes: int, entries: Sequence[Entry]) -> int:
    """Return the memory outside all budgets; below 0 if weights took memory of budgets."""
    return pool_bytes(usable_bytes, entries) - sum(entry.budget for entry in entries)


def shares(usable_bytes: int, entries: Sequence[Entry]) -> Sequence[int]:
    """Return the target budget of each.

    The memory of running requests comes first, then the demand of waiting ones, then the demand of
    busy backends and the prompt caches of idle ones. If one of these levels cannot be met,
    the backend with the least gets some first.

    Args:
        usable_bytes: The memory for all of them together.
        entries: Of all.

    Returns:
        In the order of the entries; none is below the smallest useful budget.
    """
    pool = pool_bytes(usable_bytes, entries)
    budgets = [0] * len(entries)
    for limits in zip(*map(_demands, entries), strict=True):
        budgets = _raised(budgets, limits, pool)
    return [max(budget, entry.least) for budget, entry in zip(budgets, entries, strict=True)]


def _demands(entry: Entry) -> tuple[int, ...]:
    """Return a backend's demands, the most pressing first; each includes the previous ones."""
    needed = max(entry.reserved, entry.least)
    wanted = max(entry.reserved + entry.wanted, needed)
    pleasant = entry.wish if entry.is_busy else max(entry.reserved + entry.cached, wanted)
    return tuple(min(demand, entry.wish) for demand in (needed, wanted, pleasant, entry.wish))


def _raised(budgets: Sequence[int], limits: Sequence[int], pool: int) -> list[int]:
    """Raise budgets towards their limits, the lowest first, while there is memory left."""

    def raised_to(level: int) -> list[int]:
        return [
            max(budget, min(limit, level)) for budget, limit in zip(budgets, limits, strict=True)
        ]

    levels = range(max(limits, default=0) + 1)
    below = bisect_right(levels, pool, key=lambda level: sum(raised_to(level)))
    return raised_to(max(below - 1, 0))
