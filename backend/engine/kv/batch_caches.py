"""The caches of all layers for the rows that decode together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TypeAlias

import mlx.core as mx

from backend.cache.layers import UpstreamCache, cache_bytes, upstream_name
from backend.cache.layout import cache_leaves
from backend.cache.row_kv import RowKV
from backend.engine.kv.attention import install
from backend.engine.kv.layer import RaggedKV
from backend.engine.kv.ledger import Joining, Ledger
from backend.engine.kv.spans import Reference
from backend.engine.kv.variants import LatentKV, QuantizedKV
from backend.engine.network import Caches, Network

MakeRagged: TypeAlias = Callable[[UpstreamCache], RaggedKV]


class Batching(Enum):
    """How the layers that keep every position are batched.

    Attributes:
        RAGGED: Each row has its own length, and attention runs by group.
        LATENT: The same for families that keep compressed keys (MLA).
        PADDED: With mlx-lm's batch caches, as long as the longest row.
        NONE: One row at a time.
    """

    RAGGED = "ragged"
    LATENT = "latent"
    PADDED = "padded"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The batching of a model, found at load.

    Attributes:
        batching: How its rows share a pass.
        overhead: Positions of a row that cost as much as one more group.
        shares_prefixes: Whether rows use the prompt cache in place.
        takes_several: Whether prompts of different length may be fed in one pass.
        pass_seconds: Duration of a pass by its tokens of one row; empty if decoding rows
            cannot take several in a pass and give some back.
    """

    batching: Batching = Batching.RAGGED
    overhead: float = 512.0
    shares_prefixes: bool = False
    takes_several: bool = False
    pass_seconds: Mapping[int, float] = field(default_factory=dict)

    @property
    def has_own_lengths(self) -> bool:
        """Whether every row has its own length."""
        return self.batching in _RAGGED


class BatchCaches:
    """Caches of rows that join and leave between passes; belongs to the main thread.

    A single row keeps its own caches.

    Attributes:
        layers: The caches for the network.
        count: The number of rows.
    """

    def __init__(self, plan: BatchPlan) -> None:
        """Start without rows."""
        self.layers: Caches = []
        self.count = 0
        self._plan = plan
        self._ledger: Ledger | None = None
        self._taken: tuple[int, list[int]] = (0, [])
        self._before: list[tuple[UpstreamCache, list[mx.array | None]]] = []

    @property
    def nbytes(self) -> int:
        """Size of all arrays."""
        return sum(map(cache_bytes, self.layers))

    @property
    def keeps_parts(self) -> bool:
        """Whether a row may keep a part of a pass; otherwise it keeps all of it, or none."""
        return not any(map(_is_state, cache_leaves(self.layers)))

    @property
    def can_go_back(self) -> bool:
        """Whether every layer can return to the state before a pass."""
        return all(_is_state(leaf) or _can_give_back(leaf) for leaf in cache_leaves(self.layers))

    def forward(
        self, network: Network, tokens: mx.array, counts: Sequence[int] | None = None
    ) -> mx.array:
        """Append tokens [B, T] to the rows and return the logits [B, T, V], lazily.

        Args:
            network: The model.
            tokens: Ids; shorter rows are padded on the right.
            counts: Tokens of each row, if `keep` is called after the pass.
        """
        if tokens.shape[1] > 1:
            self._order_windows()
        if counts is None:
            return self._forward(network, tokens)
        states = [leaf for leaf in cache_leaves(self.layers) if _is_state(leaf)]
        self._before = [(leaf, list(leaf.cache)) for leaf in states]
        self._taken = tokens.shape[1], list(counts)
        is_padded = min(counts) < tokens.shape[1]
        for leaf in states if is_padded else ():
            leaf.prepare(lengths=list(counts))
        logits = self._forward(network, tokens)
        for leaf in states if is_padded else ():
            leaf.finalize()
        return logits

    def keep(self, kept: Sequence[int]) -> None:
        """Drop all but each row's first `kept` tokens of the latest pass, and its padding.

        Raises:
            ValueError: A layer does not support it.
        """
        width, counts = self._taken
        before, self._before = self._before, []
        partly = [0 < n < count for n, count in zip(kept, counts, strict=True)]
        if not self.can_go_back or (before and any(partly)):
            raise ValueError("these caches keep what they have taken")
        if not all(kept):
            for leaf, arrays in before:
                leaf.cache = _chosen(kept, leaf.cache, arrays)
        self.give_back([width - n for n in kept])

    def _forward(self, network: Network, tokens: mx.array) -> mx.array:
        if self._ledger is None:
            return network(tokens, cache=self.layers)
        if tokens.shape[1] > 1 and self._plan.batching is Batching.LATENT:
            columns = mx.split(tokens, tokens.shape[1], axis=1)
            return mx.concatenate([self._forward(network, column) for column in columns], axis=1)
        self._ledger.begin(tokens.shape[1])
        logits = network(tokens, cache=self.layers)
        self._ledger.advance()
        return logits

    @property
    def keeps_positions(self) -> bool:
        """Whether every layer keeps every position, so that rows can go back any distance."""
        leaves = cache_leaves(self.layers)
        return all(isinstance(leaf, RaggedKV) or _class_name(leaf) in _POSITIONS for leaf in leaves)

    def give_back(self, counts: Sequence[int]) -> None:
        """Drop each row's latest positions, if all are kept."""
        if not any(counts):
            return
        if self._ledger is not None:
            self._ledger.give_back(counts)
        for leaf in cache_leaves(self.layers):
            _give_back(leaf, counts)
        if self._ledger is not None and self._ledger.wants_review:
            self.regroup(range(self.count), [])

    def regroup(self, staying: Sequence[int], arrivals: Sequence[Caches]) -> None:
        """Remove rows, and append others after those that stay.

        Args:
            staying: Indices of the rows that stay, in order.
            arrivals: Caches of the rows that join; their content is taken over.
        """
        total = len(staying) + len(arrivals)
        if total <= 1:
            alone = self.extract(staying[0]) if staying else next(iter(arrivals), [])
            self.layers, self._ledger = alone, None
        elif self.count <= 1 or not staying:
            self._merge([self.layers, *arrivals] if staying else arrivals)
        else:
            self._change(staying, arrivals)
        self.count = total

    def extract(self, row: int) -> Caches:
        """Return the caches of one row that is about to leave."""
        return self.layers if self.count == 1 else [_extracted(c, row) for c in self.layers]

    def _order_windows(self) -> None:
        """Put windows in order before a pass of several tokens, whose mask requires it."""
        for leaf in cache_leaves(self.layers):
            if upstream_name(leaf) == "BatchRotatingKVCache":
                leaf._temporal_order()  # noqa: SLF001 (upstream orders them after the mask is made)

    def _merge(self, rows: Sequence[Caches]) -> None:
        ledger = Ledger(self._plan.overhead)
        classes = _RAGGED.get(self._plan.batching, {})
        ragged = {name: partial(make, ledger) for name, make in classes.items()}
        self.layers = [_merged(column, ragged) for column in zip(*rows, strict=True)]
        has_ragged = any(isinstance(leaf, RaggedKV) for leaf in cache_leaves(self.layers))
        self._ledger = ledger if has_ragged else None
        if has_ragged:
            install()
            self._follow([], [list(cache_leaves(caches)) for caches in rows])

    def _change(self, staying: Sequence[int], arrivals: Sequence[Caches]) -> None:
        joining = [list(cache_leaves(caches)) for caches in arrivals]
        for index, leaf in enumerate(cache_leaves(self.layers)):
            if isinstance(leaf, RaggedKV):
                continue
            if len(staying) < self.count:
                leaf.filter(list(staying))
            if column := [leaves[index] for leaves in joining]:
                leaf.extend(column[0].merge(column))
        if self._ledger is not None:
            self._follow(staying, joining)

    def _follow(self, staying: Sequence[int], joining: Sequence[Sequence[UpstreamCache]]) -> None:
        """Apply the ledger's groups to layers with rows of different lengths."""
        ragged = {
            index: leaf
            for index, leaf in enumerate(cache_leaves(self.layers))
            if isinstance(leaf, RaggedKV)
        }
        rows = [_joining([leaves[index] for index in ragged]) for leaves in joining]
        recipes = self._ledger.regroup(staying, rows) if self._ledger else []
        for index, leaf in ragged.items():
            leaf.regroup(recipes, [leaves[index] for leaves in joining])


def _joining(leaves: Sequence[UpstreamCache]) -> Joining:
    """Return the ledger's view of a row; layers that a model does not use are empty."""
    fullest = max(leaves, key=lambda leaf: leaf.offset)
    if not isinstance(fullest, RowKV):
        return Joining(fullest.offset)
    path = (Reference(id(part.arrays[0]), part.tokens) for part in fullest.parts)
    return Joining(fullest.tail, tuple(path))


def _merged(caches: Sequence[UpstreamCache], ragged: Mapping[str, MakeRagged]) -> UpstreamCache:
    """Return the batch cache of a layer; a `ragged` one takes over its rows later."""
    first = caches[0]
    match _class_name(first):
        case "CacheList":
            columns = zip(*(cache.caches for cache in caches), strict=True)
            return type(first)(*(_merged(column, ragged) for column in columns))
        case name if name in ragged:
            return ragged[name](first)
        case _:
            return first.merge(list(caches))


def _extracted(cache: UpstreamCache, row: int) -> UpstreamCache:
    if upstream_name(cache) == "CacheList":
        return type(cache)(*(_extracted(leaf, row) for leaf in cache.caches))
    return cache.extract(row)


def _can_give_back(leaf: UpstreamCache) -> bool:
    is_counter = getattr(leaf, "counts_only", False)
    return is_counter or isinstance(leaf, RaggedKV) or _class_name(leaf) in _GIVE_BACK


def _give_back(leaf: UpstreamCache, counts: Sequence[int]) -> None:
    if getattr(leaf, "counts_only", False):
        leaf.upcoming = [place - n for place, n in zip(leaf.upcoming, counts, strict=True)]
    elif give_back := _GIVE_BACK.get(_class_name(leaf)):
        give_back(leaf, counts)


def _is_state(leaf: UpstreamCache) -> bool:
    """Tell whether a layer keeps a state of fixed size, replaced in every pass."""
    return upstream_name(leaf) == "ArraysCache"


def _chosen(
    kept: Sequence[int], after: Sequence[mx.array | None], before: Sequence[mx.array | None]
) -> list[mx.array | None]:
    """Return the arrays of a state, with the earlier ones for rows that keep nothing of a pass."""
    keeps = mx.array([n > 0 for n in kept])

    def choose(new: mx.array | None, old: mx.array | None) -> mx.array | None:
        if new is None or old is None or not any(kept):
            return old
        return mx.where(keeps.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return [choose(new, old) for new, old in zip(after, before, strict=True)]


def _class_name(leaf: UpstreamCache) -> str:
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


_RAGGED: Mapping[Batching, Mapping[str, type[RaggedKV]]] = {
    Batching.RAGGED: {"KVCache": RaggedKV, "QuantizedKVCache": QuantizedKV},
    Batching.LATENT: {"KVCache": LatentKV},
}

# These keep every position; others can only give back tokens of the latest pass.
_POSITIONS = ("KVCache", "QuantizedKVCache", "BatchKVCache")

_GIVE_BACK: Mapping[str, Callable[[UpstreamCache, Sequence[int]], None]] = {
    "KVCache": _trim,
    "QuantizedKVCache": _trim,
    "BatchKVCache": _roll,
    "RotatingKVCache": _cut,
    "BatchRotatingKVCache": _roll_window,
}
