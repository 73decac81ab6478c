"""Chooses the number of threads for the matrix products of a model on a Linux CPU."""

import logging
from collections.abc import Callable
from time import perf_counter

from common import openblas
from common.process.cores import usable_cores

# The fastest of some passes counts, or the only one of a large model.
_REPEATS = 5
_LONG_PASS_S = 0.3
# Twice as many threads must be faster by this factor: other work wants the cores as well.
_LEAST_GAIN = 1.15

log = logging.getLogger(__name__)


def adjust_product_threads(run_pass: Callable[[], object], limit: int | None) -> None:
    """Set the number of threads for all matrix products of this process from now on.

    Nothing changes without OpenBLAS, or if the environment sets more than one thread.

    Args:
        run_pass: Computes a pass of the model over a few tokens.
        limit: The maximum; `None` is as many as there are cores.
    """
    if not openblas.has_openblas() or openblas.threads() > 1:
        return

    def pass_s(threads: int) -> float:
        openblas.set_threads(threads)
        started = perf_counter()
        run_pass()
        return perf_counter() - started

    most = most_threads(limit)
    threads = fewest_threads(pass_s, most) if most > 1 else 1
    openblas.set_threads(threads)
    log.info("threads for each matrix product: %d of at most %d", threads, most)


def most_threads(limit: int | None) -> int:
    """Return the usable cores, up to a limit if there is one."""
    cores = usable_cores()
    return min(cores, limit) if limit else cores


def fewest_threads(pass_s: Callable[[int], float], most: int) -> int:
    """Return a number of threads that has a pass done hardly later than with more.

    Args:
        pass_s: Computes a pass with a number of threads, and returns its seconds.
        most: The largest number.
    """
    threads, seconds = 1, _fastest(pass_s, 1)
    while threads < most:
        more = min(2 * threads, most)
        faster = _fastest(pass_s, more)
        if seconds < _LEAST_GAIN * faster:
            break
        threads, seconds = more, faster
    return threads


def _fastest(pass_s: Callable[[int], float], threads: int) -> float:
    """Return the seconds of the fastest of some passes."""
    seconds = pass_s(threads)
    repeats = _REPEATS if seconds < _LONG_PASS_S else 1
    return min(seconds, *(pass_s(threads) for _ in range(repeats)))
