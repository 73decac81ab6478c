"""Work that is shared among threads, as matrix products are."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import TypeVar

import numpy as np

from common import openblas
from common.process import usable_cores

# From so many products of two numbers on, a second thread is worth its start.
LEAST_SHARED = 2**21

_T = TypeVar("_T")
_R = TypeVar("_R")


def product_threads() -> int:
    """Return the number of threads for a matrix product, and thus for the work here."""
    return openblas.threads() if openblas.has_openblas() else 1


def spread(compute: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """Compute some items, on several threads if products have them."""
    if product_threads() == 1 or len(items) == 1:
        return list(map(compute, items))
    return list(work_threads().map(compute, items))


def spread_range(
    compute: Callable[[tuple[int, int]], None], numbers: tuple[int, int], products: int
) -> None:
    """Compute a range of numbers, on several threads if it takes long.

    Args:
        products: The work of each number, in products of two floats.
    """
    first, last = numbers
    if (last - first) * products < LEAST_SHARED:
        compute(numbers)
        return
    edges = np.linspace(first, last, 1 + product_threads(), dtype=int)
    spread(compute, list(pairwise(edges.tolist())))


@cache
def work_threads() -> ThreadPoolExecutor:
    """The threads that compute, one per usable core."""
    return ThreadPoolExecutor(usable_cores(), thread_name_prefix="shared-work")
