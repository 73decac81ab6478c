"""The best number of threads for matrix products, as a user of mlx-lm would set it."""

from collections.abc import Callable
from time import perf_counter

from common import openblas
from common.process import usable_cores

_REPEATS = 5
# A pass that takes longer is repeated once.
_LONG_PASS_S = 0.3


def set_best_threads(run_step: Callable[[], object]) -> int:
    """Set the number with which a step is fastest; nothing changes without OpenBLAS.

    Nor does it if the environment sets more than one thread.

    Args:
        run_step: Computes one token.

    Returns:
        The number; 1 without OpenBLAS.
    """
    if not openblas.has_openblas():
        return 1
    if openblas.threads() > 1:
        return openblas.threads()

    def step_s(threads: int) -> float:
        openblas.set_threads(threads)
        first = _seconds(run_step)
        repeats = _REPEATS if first < _LONG_PASS_S else 1
        return min(first, *(_seconds(run_step) for _ in range(repeats)))

    most = usable_cores()
    numbers = sorted({min(2**n, most) for n in range(most.bit_length() + 1)})
    openblas.set_threads(best := min(numbers, key=step_s))
    return best


def _seconds(run_step: Callable[[], object]) -> float:
    started = perf_counter()
    run_step()
    return perf_counter() - started
