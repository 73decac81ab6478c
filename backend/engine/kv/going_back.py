"""How each kind of cache returns to an earlier position after a pass."""

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx

from backend.cache.layers import UpstreamCache, upstream_name
from backend.cache.row_kv import RowKV
from backend.engine.kv.layer import RaggedKV

# These keep every position; others can only give back tokens of the latest pass.
_POSITIONS = ("KVCache", "QuantizedKVCache", "BatchKVCache")


def keeps_positions(leaf: UpstreamCache) -> bool:
    """Tell whether a layer keeps every position."""
    return isinstance(leaf, RaggedKV) or class_name(leaf) in _POSITIONS


def can_give_back(leaf: UpstreamCache) -> bool:
    """Tell whether a layer can drop positions of the latest pass."""
    is_counter = getattr(leaf, "counts_only", False)
    return is_counter or isinstance(leaf, RaggedKV) or class_name(leaf) in _GIVE_BACK


def give_back(leaf: UpstreamCache, counts: Sequence[int]) -> None:
    """Drop the latest positions of each row, unless a ledger counts them."""
    if getattr(leaf, "counts_only", False):
        leaf.upcoming = [place - n for place, n in zip(leaf.upcoming, counts, strict=True)]
    elif give_back := _GIVE_BACK.get(class_name(leaf)):
        give_back(leaf, counts)


def is_state(leaf: UpstreamCache) -> bool:
    """Tell whether a layer keeps a state of fixed size, replaced in every pass."""
    return upstream_name(leaf) == "ArraysCache"


def chosen_states(
    kept: Sequence[int], after: Sequence[mx.array | None], before: Sequence[mx.array | None]
) -> list[mx.array | None]:
    """Return the arrays of a state, with the earlier ones for rows that keep nothing of a pass."""
    keeps = mx.array([n > 0 for n in kept])

    def choose(new: mx.array | None, old: mx.array | None) -> mx.array | None:
        if new is None or old is None or not any(kept):
            return old
        return mx.where(keeps.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return [choose(new, old) for new, old in zip(after, before, strict=True)]


def class_name(leaf: UpstreamCache) -> str:
    """Return the name of upstream's class that a layer stands for."""
    return "KVCache" if isinstance(leaf, RowKV) else upstream_name(leaf)


def _trim(cache: UpstreamCache, counts: Sequence[int]) -> None:
    (count,) = counts
    cache.trim(count)


def _roll(cache: UpstreamCache, counts: Sequence[int]) -> None:
    cache.prepare(right_padding=list(counts))
    cache.finalize()


def _cut(cache: UpstreamCache, counts: Sequence[int]) -> None:
    """Shorten the window of a row after a pass of several tokens, which are in order."""
    (count,) = counts
    if count:
        cache.keys = cache.keys[..., : cache.keys.shape[2] - count, :]
        cache.values = cache.values[..., : cache.values.shape[2] - count, :]
        cache.offset -= count
        cache._idx = cache.keys.shape[2]  # noqa: SLF001 (it has no public name)


def _roll_window(cache: UpstreamCache, counts: Sequence[int]) -> None:
    cache.prepare(lengths=[-count for count in counts], right_padding=list(counts))
    cache.finalize()


_GIVE_BACK: Mapping[str, Callable[[UpstreamCache, Sequence[int]], None]] = {
    "KVCache": _trim,
    "QuantizedKVCache": _trim,
    "BatchKVCache": _roll,
    "RotatingKVCache": _cut,
    "BatchRotatingKVCache": _roll_window,
}
