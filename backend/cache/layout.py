"""The structure of a network's caches over all layers: it cuts and restores prefixes."""

import logging
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import mlx.core as mx

from backend.cache.eviction import NO_THINNING, Thinning
from backend.cache.kv import (
    MAX_NODE_TOKENS,
    UNPACKED,
    Arrays,
    Block,
    Packing,
    Part,
    Piece,
    Segment,
    Snapshot,
)
from backend.cache.layers import (
    CounterLayer,
    DerivedLayer,
    LayerKind,
    PositionLayer,
    ReferenceLayer,
    StateLayer,
    UpstreamCache,
    WindowLayer,
    cache_leaves,
    class_of,
)
from backend.core.model import Reuse

# Shorter blocks are copied: attention over many short parts costs more than over one copy.
MIN_REFERENCE_TOKENS = 512

log = logging.getLogger(__name__)

# One upstream cache object per layer.
Caches: TypeAlias = Sequence[UpstreamCache]


class CaptureError(Exception):
    """Caches end at an unexpected position."""


class CacheLayout:
    """The structure of a network's caches, over all layers.

    Attributes:
        has_state: Whether a prefix can be restored only at a snapshot.
    """

    def __init__(self, kinds: Sequence[LayerKind], packing: Packing = UNPACKED) -> None:
        self.packing = packing
        self._kinds = tuple(kinds)
        self._window = max((k.size for k in kinds if isinstance(k, WindowLayer)), default=0)
        self.has_state = any(isinstance(kind, StateLayer) for kind in kinds)
        self.has_windows = self._window > 0
        self._has_references = any(isinstance(kind, ReferenceLayer) for kind in kinds)

    @classmethod
    def of(cls, caches: Caches, packing: Packing = UNPACKED) -> "CacheLayout | None":
        """Return the layout of fresh caches; `None`, with a warning, if one cannot be stored."""
        kinds: list[LayerKind] = []
        for leaf in cache_leaves(caches):
            kind = class_of(leaf).kind(leaf, packing)
            if kind is None:
                log.warning("no prompt cache for this model: it uses a %s", type(leaf).__name__)
                return None
            kinds.append(kind)
        return cls(kinds, packing)

    def capture(self, caches: Caches, start: int, stop: int) -> tuple[Block, ...]:
        """Lazily copy the KV of the tokens from `start` to `stop`, the end of the caches.

        Raises:
            CaptureError: The caches end elsewhere.
        """
        leaves = list(cache_leaves(caches))
        self._check_end(leaves, stop)
        known_from = min(max(self.windows_from(caches), start), stop)
        return (
            *self._blocks(leaves, start, known_from, has_windows=not self.has_windows),
            *self._blocks(leaves, known_from, stop, has_windows=True),
        )

    def snapshot(self, caches: Caches) -> Snapshot | None:
        """Lazily copy the states of all layers; `None` if no layer has one."""
        if not self.has_state:
            return None
        pairs = zip(self._kinds, cache_leaves(caches), strict=True)
        return Snapshot(
            tuple(kind.snapshot(leaf) for kind, leaf in pairs if isinstance(kind, StateLayer))
        )

    def windows_from(self, caches: Caches) -> int:
        """Return the first position that all layers with a window still hold."""
        pairs = zip(self._kinds, cache_leaves(caches), strict=True)
        return max(
            (k.known_from(leaf) for k, leaf in pairs if isinstance(k, WindowLayer)), default=0
        )

    def with_windows(self, caches: Caches, block: Block, start: int) -> Block:
        """Return a block with its windows, lazily copied from caches that still hold them.

        Args:
            start: Its first position.
        """
        stop = start + block.tokens
        rows = zip(self._kinds, cache_leaves(caches), block.layers, strict=True)
        layers = tuple(
            kind.slices(leaf, start, stop) if isinstance(kind, WindowLayer) else arrays
            for kind, leaf, arrays in rows
        )
        return Block(block.tokens, layers)

    @property
    def reuse(self) -> Reuse:
        """The positions at which a prefix can be reused."""
        if self.has_state:
            return Reuse.AT_SNAPSHOTS
        return Reuse.WITH_WINDOWS if self.has_windows else Reuse.ANYWHERE

    @property
    def thinning(self) -> Thinning:
        """The thinning of nodes in the middle of a conversation."""
        if self.reuse is Reuse.ANYWHERE:
            return NO_THINNING
        return Thinning(self._thinned, self._window, self.has_state)

    def usable(self, path: Sequence[Piece], limit: int) -> int:
        """Return the longest prefix, of at most `limit` tokens, that can be restored."""
        best = position = windows_from = 0
        for piece in path:
            for block, taken in piece.blocks():
                if self.has_windows and not block.has_windows:
                    windows_from = position + block.tokens
                position += taken
                end = min(position, limit)
                if not self.has_state and end - windows_from >= min(end, self._window - 1):
                    best = max(best, end)
            is_covered = position - windows_from >= min(position, self._window - 1)
            if piece.snapshot is not None and position <= limit and is_covered:
                best = position
        return best

    def restore(self, caches: Caches, path: Sequence[Piece], length: int, capacity: int) -> None:
        """Lazily fill fresh caches with a prefix.

        Args:
            caches: Of the same network. They do not write to arrays shared with the store.
            path: The pieces of the prefix; `usable` has found it restorable.
            capacity: Tokens to allocate room for.
        """
        blocks = [block for piece in path for block in piece.blocks()]
        snapshot = path[-1].snapshot
        states = iter(snapshot.states if snapshot else ())
        for index, (kind, leaf) in enumerate(zip(self._kinds, cache_leaves(caches), strict=True)):
            match kind:
                case PositionLayer():
                    kind.restore(leaf, _parts(blocks, index), length, capacity)
                case ReferenceLayer():
                    count = _referable(blocks)
                    owned = _parts(blocks[count:], index)
                    kind.restore(leaf, _references(blocks[:count], index), owned)
                case WindowLayer():
                    kind.restore(leaf, _latest_parts(blocks, index, kind.size), length)
                case StateLayer():
                    kind.restore(leaf, next(states))
                case CounterLayer():
                    kind.restore(leaf, length)

    def refer(self, caches: Caches, path: Sequence[Piece]) -> None:
        """Lazily make caches use the store's copy of their first positions instead of their own.

        Args:
            caches: They hold these positions, and perhaps more.
        """
        blocks = [block for piece in path for block in piece.blocks()]
        blocks = blocks[: _referable(blocks)]
        tokens = sum(taken for _, taken in blocks)
        for index, (kind, leaf) in enumerate(zip(self._kinds, cache_leaves(caches), strict=True)):
            if isinstance(kind, ReferenceLayer) and not leaf.empty() and tokens > leaf.shared:
                leaf.refer(_references(blocks, index))

    def referable(self, path: Sequence[Piece]) -> int:
        """Return the number of first positions of a path that caches would use in place."""
        if not self._has_references:
            return 0
        blocks = [block for piece in path for block in piece.blocks()]
        return sum(taken for _, taken in blocks[: _referable(blocks)])

    def shared(self, caches: Caches) -> int:
        """Return the number of first positions that caches use in place, in the store."""
        pairs = zip(self._kinds, cache_leaves(caches), strict=False)
        return max((c.shared for kind, c in pairs if isinstance(kind, ReferenceLayer)), default=0)

    def _blocks(
        self, leaves: Sequence[UpstreamCache], start: int, stop: int, *, has_windows: bool
    ) -> Iterator[Block]:
        for first in range(start, stop, MAX_NODE_TOKENS):
            last = min(first + MAX_NODE_TOKENS, stop)
            yield self._block(leaves, first, last, has_windows=has_windows)

    def _block(
        self, leaves: Sequence[UpstreamCache], start: int, stop: int, *, has_windows: bool
    ) -> Block:
        layers: list[Arrays] = []
        for kind, leaf in zip(self._kinds, leaves, strict=True):
            match kind:
                case PositionLayer() | ReferenceLayer():
                    layers.append(kind.slices(leaf, start, stop))
                case WindowLayer() if has_windows:
                    layers.append(kind.slices(leaf, start, stop))
                case _:
                    layers.append(())
        return Block(stop - start, tuple(layers), has_windows)

    def _thinned(self, segment: Segment) -> Segment:
        """Return a segment without its snapshot and its sliding windows."""
        return Segment(tuple(self._without_windows(block) for block in segment.blocks))

    def _without_windows(self, block: Block) -> Block:
        layers = zip(self._kinds, block.layers, strict=True)
        rest = tuple(() if isinstance(kind, WindowLayer) else arrays for kind, arrays in layers)
        return Block(block.tokens, rest, has_windows=not self.has_windows)

    def _check_end(self, leaves: Sequence[UpstreamCache], stop: int) -> None:
        for kind, leaf in zip(self._kinds, leaves, strict=True):
            has_all = not isinstance(kind, StateLayer | DerivedLayer) and not leaf.empty()
            if has_all and leaf.offset != stop:
                raise CaptureError(f"a {type(leaf).__name__} ends at {leaf.offset}, not at {stop}")


def trim_windows(caches: Caches) -> None:
    """Drop positions that no later token attends to; computed on return.

    In mlx-lm 0.32, a chunk of a prompt leaves all its positions in the ring until the next token
    or chunk. That may take long for a prompt that waits for its turn.
    """
    trimmed = []
    for leaf in cache_leaves(caches):
        kind = class_of(leaf).kind(leaf, UNPACKED)
        if isinstance(kind, WindowLayer) and not leaf.empty() and leaf.keys.shape[-2] > kind.size:
            window = kind.slices(leaf, leaf.offset - kind.size, leaf.offset)
            kind.restore(leaf, [window], leaf.offset)
            trimmed.append(leaf.state)
    mx.eval(trimmed)


def _parts(blocks: Sequence[tuple[Block, int]], index: int) -> list[Arrays]:
    """Return a layer's arrays, cut to the tokens taken."""
    return [
        tuple(array[..., :taken, :] for array in block.layers[index]) for block, taken in blocks
    ]


def _referable(blocks: Sequence[tuple[Block, int]]) -> int:
    """Return the number of first blocks that are long enough, on average, to be read in place."""
    best = tokens = 0
    for count, (_, taken) in enumerate(blocks, start=1):
        tokens += taken
        if tokens >= count * MIN_REFERENCE_TOKENS:
            best = count
    return best


def _references(blocks: Sequence[tuple[Block, int]], index: int) -> list[Part]:
    """Return a layer's arrays, not copied; none for a layer that the model does not use."""
    return [Part(block.layers[index], taken) for block, taken in blocks if block.layers[index]]


def _latest_parts(blocks: Sequence[tuple[Block, int]], index: int, window: int) -> list[Arrays]:
    """Return as many of a layer's last arrays as cover a window."""
    first = len(blocks)
    covered = 0
    while first > 0 and covered < window and blocks[first - 1][0].has_windows:
        first -= 1
        covered += blocks[first][1]
    return _parts(blocks[first:], index)
