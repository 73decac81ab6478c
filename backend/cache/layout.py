"""A network's caches as a whole: stored from them, restored to them, all layers at one place."""

import logging
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from backend.cache.kv import MAX_NODE_TOKENS, Arrays, Block, Piece, Segment, Snapshot
from backend.cache.layers import (
    CounterLayer,
    LayerKind,
    PositionLayer,
    ReferenceLayer,
    StateLayer,
    UpstreamCache,
    WindowLayer,
    layer_kind,
    upstream_name,
)
from backend.cache.packing import UNPACKED, Packing
from backend.cache.row_kv import Part
from backend.cache.worth import Thinning
from backend.core.model import Reuse

# Shorter ones are copied: attention over many short parts costs more than over one copy.
MIN_REFERENCE_TOKENS = 512

log = logging.getLogger(__name__)

# One upstream cache object per layer.
Caches: TypeAlias = Sequence[UpstreamCache]


class CaptureError(Exception):
    """Caches do not end where they should."""


class CacheLayout:
    """What the caches of a network are made of, decided over all layers.

    Attributes:
        has_state: Whether a prefix can be taken up only where a snapshot was made.
        has_windows: Whether layers forget old positions.
    """

    def __init__(self, kinds: Sequence[LayerKind]) -> None:
        """Take how each leaf of the caches is read and restored, in order."""
        self._kinds = tuple(kinds)
        self._window = max((k.size for k in kinds if isinstance(k, WindowLayer)), default=0)
        self.has_state = any(isinstance(kind, StateLayer) for kind in kinds)
        self.has_windows = self._window > 0
        self._has_references = any(isinstance(kind, ReferenceLayer) for kind in kinds)

    @classmethod
    def of(cls, caches: Caches, packing: Packing = UNPACKED) -> "CacheLayout | None":
        """Look at fresh caches; `None`, with a warning, for a class that cannot be stored."""
        kinds: list[LayerKind] = []
        for leaf in cache_leaves(caches):
            kind = layer_kind(leaf, packing)
            if kind is None:
                log.warning("no prompt cache for this model: it uses a %s", type(leaf).__name__)
                return None
            kinds.append(kind)
        return cls(kinds)

    def capture(self, caches: Caches, start: int, stop: int) -> tuple[Block, ...]:
        """Copy the KV of the tokens from `start` to `stop`, where the caches end; lazily.

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
        """Copy the states of all layers, lazily; `None` where no layer has one."""
        if not self.has_state:
            return None
        pairs = zip(self._kinds, cache_leaves(caches), strict=True)
        return Snapshot(
            tuple(kind.snapshot(leaf) for kind, leaf in pairs if isinstance(kind, StateLayer))
        )

    def windows_from(self, caches: Caches) -> int:
        """Return the first position of which all layers with a window still know."""
        pairs = zip(self._kinds, cache_leaves(caches), strict=True)
        return max(
            (k.known_from(leaf) for k, leaf in pairs if isinstance(k, WindowLayer)), default=0
        )

    def with_windows(self, caches: Caches, block: Block, start: int) -> Block:
        """Return a block with its windows, copied from caches that know of them; lazily.

        Args:
            caches: Which hold the tokens of the block.
            block: Perhaps without windows.
            start: Where it begins.
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
        """Where a prefix can be taken up."""
        if self.has_state:
            return Reuse.AT_SNAPSHOTS
        return Reuse.WITH_WINDOWS if self.has_windows else Reuse.ANYWHERE

    @property
    def thinning(self) -> Thinning | None:
        """What nodes in the middle of a conversation can give up; `None` is nothing."""
        if not (self.has_state or self.has_windows):
            return None
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
        """Fill fresh caches with a prefix; lazily.

        Args:
            caches: Of the same network. What they share with the store they do not write to.
            path: The pieces of the prefix, which `usable` has found to be whole.
            length: Tokens of the prefix.
            capacity: Tokens for which there shall be room.
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
        """Let caches use the store's copy of their first positions instead of their own; lazily.

        Args:
            caches: Which hold these positions, and perhaps more.
            path: The pieces of a prefix of theirs.
        """
        blocks = [block for piece in path for block in piece.blocks()]
        blocks = blocks[: _referable(blocks)]
        tokens = sum(taken for _, taken in blocks)
        for index, (kind, leaf) in enumerate(zip(self._kinds, cache_leaves(caches), strict=True)):
            if isinstance(kind, ReferenceLayer) and not leaf.empty() and tokens > leaf.shared:
                leaf.refer(_references(blocks, index))

    def referable(self, path: Sequence[Piece]) -> int:
        """Return how many first positions of a path caches would use where they lie."""
        if not self._has_references:
            return 0
        blocks = [block for piece in path for block in piece.blocks()]
        return sum(taken for _, taken in blocks[: _referable(blocks)])

    def shared(self, caches: Caches) -> int:
        """Return how many first positions caches use where the store keeps them."""
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
        """Return a segment without its snapshot and the layers that only a cut inside needs."""
        return Segment(tuple(self._without_windows(block) for block in segment.blocks))

    def _without_windows(self, block: Block) -> Block:
        layers = zip(self._kinds, block.layers, strict=True)
        rest = tuple(() if isinstance(kind, WindowLayer) else arrays for kind, arrays in layers)
        return Block(block.tokens, rest, has_windows=not self.has_windows)

    def _check_end(self, leaves: Sequence[UpstreamCache], stop: int) -> None:
        for kind, leaf in zip(self._kinds, leaves, strict=True):
            if not isinstance(kind, StateLayer) and not leaf.empty() and leaf.offset != stop:
                raise CaptureError(f"a {type(leaf).__name__} ends at {leaf.offset}, not at {stop}")


def cache_leaves(caches: Caches) -> Iterator[UpstreamCache]:
    """Yield the caches that hold arrays, in a fixed order; a `CacheList` holds others."""
    for cache in caches:
        if upstream_name(cache) == "CacheList":
            yield from cache_leaves(cache.caches)
        else:
            yield cache


def _parts(blocks: Sequence[tuple[Block, int]], index: int) -> list[Arrays]:
    """Return a layer's arrays, cut to the tokens that are wanted."""
    return [
        tuple(array[..., :taken, :] for array in block.layers[index]) for block, taken in blocks
    ]


def _referable(blocks: Sequence[tuple[Block, int]]) -> int:
    """Return how many of the first blocks are long enough, on average, to be read by themselves."""
    best = tokens = 0
    for count, (_, taken) in enumerate(blocks, start=1):
        tokens += taken
        if tokens >= count * MIN_REFERENCE_TOKENS:
            best = count
    return best


def _references(blocks: Sequence[tuple[Block, int]], index: int) -> list[Part]:
    """Return a layer's arrays as they are; none for a layer that the model does not use."""
    return [Part(block.layers[index], taken) for block, taken in blocks if block.layers[index]]


def _latest_parts(blocks: Sequence[tuple[Block, int]], index: int, window: int) -> list[Arrays]:
    """Return as many of a layer's last arrays as cover a window."""
    first = len(blocks)
    covered = 0
    while first > 0 and covered < window and blocks[first - 1][0].has_windows:
        first -= 1
        covered += blocks[first][1]
    return _parts(blocks[first:], index)
