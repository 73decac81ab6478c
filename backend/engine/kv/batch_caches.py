"""The caches of all layers for the rows that decode together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, SupportsIndex, TypeAlias

import mlx.core as mx

from backend.cache.kv import RowKV
from backend.cache.layers import (
    Form,
    GoBack,
    UpstreamCache,
    cache_bytes,
    cache_leaves,
    class_of,
    is_empty,
    with_leaves,
)
from backend.engine.kv.layer import LatentKV, LatestKV, QuantizedKV, RaggedKV, install
from backend.engine.kv.ledger import Joining, Ledger
from backend.engine.kv.spans import Column, Reference
from backend.engine.plan import Batching, BatchPlan, Caches, Decoder

# An upstream cache, or a list of some.
Untyped: TypeAlias = Any


def early_start(network: Decoder, inputs: mx.array, cache: Caches) -> mx.array:
    """Append tokens [B, T] to the caches and return the logits [B, T, V], lazily.

    For a device with nothing else to compute: it does not wait until Python has built the graph.
    """
    layers = _Layers(cache)
    logits = network(inputs, cache=layers)
    # Some models replace entries of the given list.
    cache[:] = layers.copy()
    return logits


class _Layers(list[Any]):
    """The caches of all layers, which a network goes through while it builds its graph."""

    def __iter__(self) -> Iterator[Any]:
        """Yield each; after one, two, four and so on, the device begins with those before."""
        for count, cache in enumerate(super().__iter__()):
            if count.bit_count() == 1 and not is_empty(before := self[count - 1]):
                mx.async_eval(before.state)
            yield cache

    def __getitem__(self, index: SupportsIndex | slice) -> Untyped:
        """Return a cache, or some that are gone through in the same way."""
        found = super().__getitem__(index)
        return _Layers(found) if isinstance(index, slice) else found


MakeRagged: TypeAlias = Callable[[UpstreamCache], RaggedKV]


class RowCaches:
    """The caches of one layer, one of each row: attention takes them one by one.

    Code outside of attention asks for values that all rows share, and gets those of the first.
    """

    def __init__(self, row_caches: Sequence[UpstreamCache]) -> None:
        self.row_caches = list(row_caches)

    def __getattr__(self, name: str) -> Untyped:
        """Return an attribute of the first row's cache."""
        if name.startswith("__") or name in _OF_ONE_ROW:
            raise AttributeError(name)
        return getattr(self.row_caches[0], name)

    def __getitem__(self, index: int) -> "RowCaches":
        """Return the caches of rows in one place of a list of caches."""
        return RowCaches([cache[index] for cache in self.row_caches])

    def filter(self, staying: Sequence[int]) -> None:
        """Keep some rows."""
        self.row_caches = [self.row_caches[row] for row in staying]

    def extend(self, other: "RowCaches") -> None:
        """Append rows."""
        self.row_caches += other.row_caches

    def extract(self, row: int) -> UpstreamCache:
        """Return a row's own cache."""
        return self.row_caches[row]

    def give_back(self, counts: Sequence[int]) -> None:
        """Drop each row's latest positions."""
        for cache, count in zip(self.row_caches, counts, strict=True):
            for leaf in cache_leaves([cache]):
                if give_back := class_of(leaf).give_back:
                    give_back(leaf, [count])

    @property
    def keeps_positions(self) -> bool:
        """Whether every position is kept, so that any number can be given back."""
        return all(class_of(leaf).keeps_positions for leaf in cache_leaves(self.row_caches))

    def empty(self) -> bool:
        """Tell whether a row is empty."""
        return any(map(is_empty, self.row_caches))

    @property
    def nbytes(self) -> int:
        """Size of all arrays."""
        return sum(map(cache_bytes, self.row_caches))

    @property
    def state(self) -> list[Untyped]:
        """All arrays."""
        return [cache.state for cache in self.row_caches]


# With the keys of several rows, they would change the first.
_OF_ONE_ROW = frozenset({"row_caches", "update_and_fetch", "caches"})


class BatchCaches:
    """Caches of rows that join and leave between passes; belongs to the main thread.

    A single row keeps its own caches.

    Attributes:
        keeps_parts: Whether a row may keep a part of a pass; otherwise it keeps all of it, or none.
        can_go_back: Whether every layer can return to the state before a pass.
    """

    def __init__(self, plan: BatchPlan) -> None:
        self.layers: Caches = []
        self.count = 0
        self.keeps_parts = self.can_go_back = self._is_ragged = True
        self.plan = plan
        self._column: Column | None = None
        self.ledger: Ledger | None = None
        self._taken: tuple[Sequence[int], Sequence[int]] = [], []
        self._ways_back: list[GoBack] = []

    @property
    def nbytes(self) -> int:
        """Size of all arrays."""
        return sum(map(cache_bytes, self.layers))

    @property
    def packs(self) -> bool:
        """Whether rows that take fewer tokens than others in a pass are not padded."""
        return self.plan.packs and self._is_ragged

    def computed(self, counts: Sequence[int]) -> int:
        """Return how many tokens a pass computes that takes `counts` of the rows."""
        return sum(counts) if self.packs else len(counts) * max(counts)

    def forward(self, network: Decoder, tokens: mx.array, *, is_idle: bool = False) -> mx.array:
        """Append tokens [B, T] to the rows and return the logits [B, T, V], lazily."""
        self._column = None
        if tokens.shape[1] > 1:
            self._order_windows()
        return self._forward(self._starting(network) if is_idle else network, tokens)

    def take(self, network: Decoder, inputs: Sequence[Sequence[int]]) -> mx.array:
        """Append unlike numbers of tokens to the rows, at least one each; `keep` follows.

        The device has nothing else to compute.

        Returns:
            The logits [N, V] of all tokens, row by row, lazily.
        """
        column = Column(list(map(len, inputs)))
        # Compressed keys are read one token at a time.
        reads_several = column.width == 1 or self.plan.batching is Batching.RAGGED
        if self.ledger is None or not self.packs or (column.is_even and reads_several):
            self._taken = [column.width] * len(inputs), column.counts
            return column.of(self._take_padded(network, inputs, column.width))
        self._taken = column.counts, column.counts
        self._column = column
        self.ledger.begin_packed(column)
        tokens = mx.array([[token_id] for own in inputs for token_id in own])
        logits = self._starting(network)(tokens, cache=self.layers)
        self.ledger.advance()
        return logits[:, 0]

    def _take_padded(
        self, network: Decoder, inputs: Sequence[Sequence[int]], width: int
    ) -> mx.array:
        """Return the logits [B, width, V] of rows that are padded on the right."""
        lengths = list(map(len, inputs))
        known = [(leaf, class_of(leaf).remember) for leaf in cache_leaves(self.layers)]
        states = [(leaf, remember) for leaf, remember in known if remember]
        self._ways_back = [remember(leaf) for leaf, remember in states]
        padded_states = [leaf for leaf, _ in states] if min(lengths) < width else []
        for leaf in padded_states:
            leaf.prepare(lengths=lengths)
        padded = [[*tokens, *[tokens[-1]] * (width - len(tokens))] for tokens in inputs]
        logits = self.forward(network, mx.array(padded), is_idle=True)
        for leaf in padded_states:
            leaf.finalize()
        return logits

    def latest(self, layers: Sequence[int]) -> list[LatestKV]:
        """Return the KV that each row's latest token sees in some layers, until the next pass."""
        if self.ledger is not None:
            self.ledger.begin_latest()
        return [LatestKV(self.layers[layer]) for layer in layers]

    def by_row(self, array: mx.array) -> mx.array:
        """Return an output of a module in the latest pass as [B, T, n]."""
        return array if self._column is None else self._column.by_row(array)

    def keep(self, kept: Sequence[int]) -> None:
        """Drop all but each row's first `kept` tokens of the latest `take`.

        Raises:
            ValueError: A layer does not support it.
        """
        taken, counts = self._taken
        ways_back, self._ways_back = self._ways_back, []
        partly = [0 < n < count for n, count in zip(kept, counts, strict=True)]
        given_back = [count - n for count, n in zip(taken, kept, strict=True)]
        if any(given_back) and (not self.can_go_back or (ways_back and any(partly))):
            raise ValueError("these caches keep what they have taken")
        for go_back in ways_back:
            go_back(kept)
        self.give_back(given_back)

    def _starting(self, network: Decoder) -> Decoder:
        """Return the network for a pass of an idle device."""
        return partial(early_start, network) if self.plan.starts_early else network

    def _forward(self, network: Decoder, tokens: mx.array) -> mx.array:
        is_wide = self.count > 1 and tokens.shape[1] > 1
        if is_wide and self.plan.batching in (Batching.LATENT, Batching.BY_ROW):
            columns = mx.split(tokens, tokens.shape[1], axis=1)
            return mx.concatenate([self._forward(network, column) for column in columns], axis=1)
        if self.ledger is None:
            return network(tokens, cache=self.layers)
        self.ledger.begin(tokens.shape[1])
        logits = network(tokens, cache=self.layers)
        self.ledger.advance()
        return logits

    @property
    def keeps_positions(self) -> bool:
        """Whether every layer keeps every position, so that rows can go back any distance."""
        return all(map(_keeps_positions, cache_leaves(self.layers)))

    def give_back(self, counts: Sequence[int]) -> None:
        """Drop each row's latest positions, if all are kept."""
        if not any(counts):
            return
        if self.ledger is not None:
            self.ledger.give_back(counts)
        for leaf in cache_leaves(self.layers):
            # A ledger counts the positions of the other layers.
            if isinstance(leaf, RowCaches):
                leaf.give_back(counts)
            elif give_back := class_of(leaf).give_back:
                give_back(leaf, counts)
        if self.ledger is not None and self.ledger.wants_review:
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
            self.layers, self.ledger = alone, None
        elif self.count <= 1 or not staying:
            self._merge([self.layers, *arrivals] if staying else arrivals)
        else:
            self._change(staying, arrivals)
        self.count = total
        leaves = list(cache_leaves(self.layers))
        self.keeps_parts = not any(class_of(leaf).remember for leaf in leaves)
        self.can_go_back = all(map(_can_go_back, leaves))
        self._is_ragged = all(isinstance(leaf, RaggedKV) for leaf in leaves)

    def extract(self, row: int) -> Caches:
        """Return the caches of one row that is about to leave."""
        return (
            self.layers
            if self.count == 1
            else [with_leaves(lambda leaf: leaf.extract(row), cache) for cache in self.layers]
        )

    def _order_windows(self) -> None:
        """Put windows in order before a pass of several tokens, whose mask requires it."""
        for leaf in cache_leaves(self.layers):
            if order := class_of(leaf).order:
                order(leaf)

    def _merge(self, rows: Sequence[Caches]) -> None:
        if self.plan.batching is Batching.BY_ROW:
            self.layers = [_one_by_one(column) for column in zip(*rows, strict=True)]
            self.ledger = None
            return
        ledger = Ledger(self.plan.overhead)
        forms = _RAGGED.get(self.plan.batching, {})
        merged = partial(_merged, {form: partial(make, ledger) for form, make in forms.items()})
        self.layers = [with_leaves(merged, *column) for column in zip(*rows, strict=True)]
        has_ragged = any(isinstance(leaf, RaggedKV) for leaf in cache_leaves(self.layers))
        self.ledger = ledger if has_ragged else None
        if has_ragged:
            install()
            self._follow([], [list(cache_leaves(caches)) for caches in rows])

    def _change(self, staying: Sequence[int], arrivals: Sequence[Caches]) -> None:
        by_row = self.plan.batching is Batching.BY_ROW
        joining = [list(caches if by_row else cache_leaves(caches)) for caches in arrivals]
        unite = _one_by_one if by_row else _merge_all
        for index, leaf in enumerate(cache_leaves(self.layers)):
            if isinstance(leaf, RaggedKV):
                continue
            if len(staying) < self.count:
                leaf.filter(list(staying))
            if column := [leaves[index] for leaves in joining]:
                leaf.extend(unite(column))
        if self.ledger is not None:
            self._follow(staying, joining)

    def _follow(self, staying: Sequence[int], joining: Sequence[Sequence[UpstreamCache]]) -> None:
        """Apply the ledger's groups to layers with rows of different lengths."""
        ragged = {
            index: leaf
            for index, leaf in enumerate(cache_leaves(self.layers))
            if isinstance(leaf, RaggedKV)
        }
        rows = [_joining([leaves[index] for index in ragged]) for leaves in joining]
        recipes = self.ledger.regroup(staying, rows) if self.ledger else []
        for index, leaf in ragged.items():
            leaf.regroup(recipes, [leaves[index] for leaves in joining])


def _joining(leaves: Sequence[UpstreamCache]) -> Joining:
    """Return the ledger's view of a row; layers that a model does not use are empty."""
    fullest = max(leaves, key=lambda leaf: leaf.offset)
    if not isinstance(fullest, RowKV):
        return Joining(fullest.offset)
    path = (Reference(id(part.arrays[0]), part.tokens) for part in fullest.parts)
    return Joining(fullest.tail, tuple(path))


def _merge_all(column: Sequence[UpstreamCache]) -> UpstreamCache:
    return column[0].merge(column)


def _one_by_one(column: Sequence[UpstreamCache]) -> UpstreamCache:
    """Return the caches of a layer for all rows, as they are; only counters are merged."""
    counts_only = getattr(column[0], "counts_only", False)
    return _merge_all(column) if counts_only else RowCaches(column)


def _keeps_positions(leaf: UpstreamCache) -> bool:
    if isinstance(leaf, RowCaches):
        return leaf.keeps_positions
    return isinstance(leaf, RaggedKV) or class_of(leaf).keeps_positions


def _merged(ragged: Mapping[Form, MakeRagged], *leaves: UpstreamCache) -> UpstreamCache:
    """Return the batch cache of a layer; a `ragged` one takes over its rows later."""
    first = leaves[0]
    form = class_of(first).form
    if form is None or form not in ragged:
        return first.merge(list(leaves))
    return ragged[form](first)


def _can_go_back(leaf: UpstreamCache) -> bool:
    """Tell whether a layer can return to its state before the latest pass."""
    known = class_of(leaf)
    return _keeps_positions(leaf) or known.remember is not None or known.give_back is not None


_RAGGED: Mapping[Batching, Mapping[Form, type[RaggedKV]]] = {
    Batching.RAGGED: {Form.PLAIN: RaggedKV, Form.QUANTISED: QuantizedKV},
    Batching.LATENT: {Form.PLAIN: LatentKV},
}
