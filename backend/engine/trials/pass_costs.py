"""Measures the cost of passes of several tokens."""

import math
from collections.abc import Sequence
from time import perf_counter

import mlx.core as mx

from backend.engine.network import Caches, FreshCaches, Network
from backend.engine.passes.ranks import ALONE
from backend.engine.trials.trial_steps import Pieces, computed, cut, prefilled

_PROMPT_TOKENS = 16
_WIDTHS = (1, 2, 4, 8, 16, 32)
# The fastest of some runs counts: other processes may use the machine.
_REPEATS = 3


def measured_pass_seconds(
    network: Network, fresh_caches: FreshCaches, token_ids: Sequence[int]
) -> Pieces[dict[int, float]]:
    """Return the seconds of a pass over one row by its number of tokens, on one process.

    Args:
        network: The model.
        fresh_caches: Creates the caches of one sequence.
        token_ids: Tokens of a text.
    """
    prompt = cut(token_ids, 0, _PROMPT_TOKENS)
    caches = yield from prefilled(ALONE, network, fresh_caches(), prompt)
    fastest = dict.fromkeys(_WIDTHS, math.inf)
    # All widths in turn: a busy moment does not hit all passes of one.
    for n in range(_REPEATS):
        for width in _WIDTHS:
            seconds = _pass_s(network, caches, cut(token_ids, n, width))
            fastest[width] = min(fastest[width], seconds)
            yield
    return fastest


def _pass_s(network: Network, caches: Caches, tokens: Sequence[int]) -> float:
    started = perf_counter()
    computed(ALONE, lambda: network(mx.array([tokens]), cache=caches))
    return perf_counter() - started
