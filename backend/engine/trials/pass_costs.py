"""Measures a model: the cost of passes and of groups of rows, and the memory of its caches."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import mlx.core as mx

from backend.cache.kv import RowKV
from backend.cache.layers import cache_leaves, growth_of
from backend.config import TuningOptions
from backend.engine.kv.layer import RaggedKV
from backend.engine.kv.ledger import Joining, Ledger
from backend.engine.passes.agreement import ALONE
from backend.engine.passes.caches import foreseen_cache_factory
from backend.engine.plan import MODEL_ERRORS, Caches, Decoder, FreshCaches
from backend.engine.rows.admission import KvProfile, WindowProfile
from backend.engine.trials.trial_steps import Pieces, computed, cut, prefilled

_PROMPT_TOKENS = 16
_WIDTHS = (1, 2, 4, 8, 16, 32)
_PROBE_WIDTHS = (1, 32)
# The fastest of some runs counts: other processes may use the machine.
_REPEATS = 3


def measured_pass_seconds(
    network: Decoder, fresh_caches: FreshCaches, token_ids: Sequence[int]
) -> Pieces[dict[int, float]]:
    """Return the seconds of a pass over one row by its number of tokens, on one process."""
    prompt = cut(token_ids, 0, _PROMPT_TOKENS)
    caches = yield from prefilled(ALONE, network, fresh_caches(), prompt)
    fastest = dict.fromkeys(_WIDTHS, math.inf)
    # All widths in turn: a busy moment does not hit all passes of one.
    for n in range(_REPEATS):
        for width in _WIDTHS:
            tokens = mx.array([cut(token_ids, n, width)])
            seconds = _timed(partial(computed, ALONE, partial(network, tokens, cache=caches)))
            fastest[width] = min(fastest[width], seconds)
            yield
    return fastest


def measured_probe_seconds(probe: Callable[[int], mx.array]) -> dict[int, float]:
    """Return the seconds of a pass that returns its outputs lazily, by its number of tokens."""
    fastest = dict.fromkeys(_PROBE_WIDTHS, math.inf)
    for _ in range(_REPEATS):
        for width in _PROBE_WIDTHS:
            seconds = _timed(partial(_probed, probe, width))
            fastest[width] = min(fastest[width], seconds)
    return fastest


def _probed(probe: Callable[[int], mx.array], width: int) -> None:
    mx.eval(probe(width))


_PROBE = (0, 1)


def foresee(network: Decoder, fresh_caches: FreshCaches) -> KvProfile:
    """Return the memory of one sequence's caches from shapes alone, without reading weights."""
    caches = fresh_caches()
    network(mx.array([_PROBE]), cache=caches)
    return profile_of(caches)


def foresee_kv(network: Decoder, tuning: TuningOptions) -> KvProfile | None:
    """Return the same for the caches that the options request.

    Returns:
        `None` if the model does not support quantised ones.
    """
    try:
        return foresee(network, foreseen_cache_factory(network, tuning))
    except MODEL_ERRORS:
        if tuning.memory.kv_bits is None:
            raise
        return None


def profile_of(caches: Caches) -> KvProfile:
    """Return the memory of one sequence's caches, which have taken some tokens."""
    growths = [growth_of(leaf) for leaf in cache_leaves(caches)]
    windows: Counter[int] = Counter()
    for growth in growths:
        if growth.window:
            windows[growth.window] += growth.bytes_per_token
    return KvProfile(
        bytes_per_token=sum(each.bytes_per_token for each in growths if not each.window),
        fixed_bytes=sum(each.fixed_bytes for each in growths),
        windows=tuple(WindowProfile(total, size) for size, total in sorted(windows.items())),
    )


_ROWS = 4
_SHORT, _LONG = 16, 1040
_LAYERS = 2
_GROUP_REPEATS = 5
_ONE_GROUP, _A_GROUP_EACH = float("inf"), 0.0
# Bounds against a busy machine: a group never costs less than a few positions, or more than
# all of a long row.
_BOUNDS = (32.0, 16384.0)


def measured_overhead(keys: mx.array, values: mx.array) -> float:
    """Return the positions of a row that cost as much as one more group.

    Args:
        keys: Of a layer, [1, kv heads, positions, width]; gives heads, width and data type.
    """
    like = (keys, values)
    together = _step_seconds(like, _SHORT, _ONE_GROUP)
    apart = _step_seconds(like, _SHORT, _A_GROUP_EACH)
    longer = _step_seconds(like, _LONG, _ONE_GROUP)
    group_s = (apart - together) / (_ROWS - 1)
    position_s = (longer - together) / (_ROWS * (_LONG - _SHORT))
    least, most = _BOUNDS
    return min(max(group_s / position_s, least), most) if position_s > 0 else most


def _step_seconds(like: Sequence[mx.array], length: int, overhead: float) -> float:
    """Return the time of attention in a step of some rows, the fastest of several runs."""
    keys, values = (_random(array, length) for array in like)
    layers = []
    ledger = Ledger(overhead)
    recipes = ledger.regroup([], [Joining(length)] * _ROWS)
    for _ in range(_LAYERS):
        layer = RaggedKV(ledger, RowKV())
        layer.regroup(recipes, [_row(keys, values) for _ in range(_ROWS)])
        layers.append(layer)
    new = [mx.contiguous(mx.repeat(a[:, :, :1], _ROWS, axis=0)) for a in (keys, values)]
    mx.eval(new, [layer.state for layer in layers])
    return min(_timed(lambda: _step(ledger, layers, new)) for _ in range(_GROUP_REPEATS))


def _step(ledger: Ledger, layers: Sequence[RaggedKV], new: Sequence[mx.array]) -> None:
    keys, values = new
    ledger.begin(1)
    queries = keys
    for layer in layers:
        layer.update_and_fetch(keys, values)
        output = layer.attend(queries, 1.0, None, None)
        queries = queries + output.sum(axis=-1, keepdims=True)
    ledger.advance()
    mx.eval(queries)


def _timed(action: Callable[[], object]) -> float:
    started = perf_counter()
    action()
    return perf_counter() - started


def _row(keys: mx.array, values: mx.array) -> RowKV:
    row = RowKV()
    row.keys, row.values, row.tail = keys, values, keys.shape[2]
    return row


def _random(like: mx.array, length: int) -> mx.array:
    return mx.random.normal((1, like.shape[1], length, like.shape[3])).astype(like.dtype)
