"""Measures the cost of a group of rows on this machine, for a layer like the model's."""

import time
from collections.abc import Callable, Sequence

import mlx.core as mx

from backend.cache.row_kv import RowKV
from backend.engine.kv.layer import RaggedKV
from backend.engine.kv.ledger import Joining, Ledger

_ROWS = 4
_SHORT, _LONG = 16, 1040
_LAYERS = 2
_REPEATS = 5
_ONE_GROUP, _A_GROUP_EACH = float("inf"), 0.0
# Bounds against a busy machine: a group never costs less than a few positions, or more than
# all of a long row.
_BOUNDS = (32.0, 16384.0)


def measured_overhead(keys: mx.array, values: mx.array) -> float:
    """Return the positions of a row that cost as much as one more group.

    Args:
        keys: Of a layer, [1, kv heads, positions, width]; gives heads, width and data type.
        values: The same.
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
    return min(_timed(lambda: _step(ledger, layers, new)) for _ in range(_REPEATS))


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


def _timed(action: Callable[[], None]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _row(keys: mx.array, values: mx.array) -> RowKV:
    row = RowKV()
    row.keys, row.values, row.tail = keys, values, keys.shape[2]
    return row


def _random(like: mx.array, length: int) -> mx.array:
    return mx.random.normal((1, like.shape[1], length, like.shape[3])).astype(like.dtype)
