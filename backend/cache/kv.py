"""What a node of the prompt cache holds: KV of its own tokens, and perhaps the state at its end.

All arrays are the store's own copies. They are never written to. Cuts are lazy: `evaluate`
computes them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx

from backend.cache.token_key import TokenKey

Arrays: TypeAlias = tuple[mx.array, ...]

MAX_NODE_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Block:
    """KV of consecutive tokens.

    Attributes:
        tokens: How many.
        layers: Per layer, arrays [..., tokens, width]; none for a layer without positions.
        has_windows: Whether the layers with a sliding window are among them.
    """

    tokens: int
    layers: tuple[Arrays, ...]
    has_windows: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; evaluates none."""
        return sum(array.nbytes for arrays in self.layers for array in arrays)

    def split(self, at: int) -> tuple["Block", "Block"]:
        """Return the first `at` tokens and the others, as arrays of their own."""
        return self._cut(0, at), self._cut(at, self.tokens)

    def _cut(self, start: int, stop: int) -> "Block":
        layers = tuple(
            tuple(mx.contiguous(array[..., start:stop, :]) for array in arrays)
            for arrays in self.layers
        )
        return Block(stop - start, layers, self.has_windows)


# Returns a block with its windows, given where it begins.
Refill: TypeAlias = Callable[[Block, int], Block]


@dataclass(frozen=True, slots=True)
class State:
    """What a layer that cannot be cut by position knows at one place.

    Attributes:
        arrays: `None` stands for one that is not there yet.
        numbers: What it counts.
    """

    arrays: tuple[mx.array | None, ...]
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The states of all layers that have one, at one place."""

    states: tuple[State, ...]

    @property
    def arrays(self) -> Arrays:
        """All arrays that are there."""
        return tuple(a for state in self.states for a in state.arrays if a is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; evaluates none."""
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True, slots=True)
class Segment:
    """The value of a node: the blocks of its tokens, and the snapshot at its end, if any."""

    blocks: tuple[Block, ...]
    snapshot: Snapshot | None = None

    @property
    def tokens(self) -> int:
        """How many tokens it describes."""
        return sum(block.tokens for block in self.blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; evaluates none."""
        own = self.snapshot.nbytes if self.snapshot else 0
        return own + sum(block.nbytes for block in self.blocks)

    def split(self, at: int) -> tuple["Segment", "Segment"]:
        """Return the first `at` tokens and the others; the snapshot stays at the end."""
        left: list[Block] = []
        right: list[Block] = []
        for block in self.blocks:
            if at <= 0:
                right.append(block)
            elif at >= block.tokens:
                left.append(block)
            else:
                first, second = block.split(at)
                left.append(first)
                right.append(second)
            at -= block.tokens
        return Segment(tuple(left)), Segment(tuple(right), self.snapshot)

    def refilled(self, start: int, first: int, refill: Refill) -> "Segment":
        """Return the segment with windows from a place on.

        Args:
            start: Where the segment begins.
            first: The place.
            refill: Returns a block that begins at a place with its windows.
        """
        if start < first < start + self.tokens:
            head, tail = self.split(first - start)
            return Segment(head.blocks + tail.refilled(first, first, refill).blocks, self.snapshot)
        blocks: list[Block] = []
        for block in self.blocks:
            blocks.append(block if block.has_windows else refill(block, start))
            start += block.tokens
        return Segment(tuple(blocks), self.snapshot)

    def behind(self, known: int) -> "Segment":
        """Return what follows the first tokens; of all of them the snapshot is left."""
        return Segment((), self.snapshot) if known >= self.tokens else self.split(known)[1]

    def joined(self, other: "Segment") -> "Segment | None":
        """Return both as one; `None` for what is evicted apart, or has a snapshot between."""
        if self.snapshot is not None or self.tokens + other.tokens > MAX_NODE_TOKENS:
            return None
        return Segment(self.blocks + other.blocks, other.snapshot)


@dataclass(frozen=True, slots=True)
class LooseNode:
    """A node by itself.

    Attributes:
        key: The tokens from the root to the node's end.
        start: Where the node begins.
    """

    key: TokenKey
    start: int
    segment: Segment


@dataclass(frozen=True, slots=True)
class Piece:
    """The first `tokens` tokens of a segment: one step on the path of a prefix."""

    segment: Segment
    tokens: int

    @property
    def snapshot(self) -> Snapshot | None:
        """The state at its end; none when the segment goes on behind it."""
        return self.segment.snapshot if self.tokens == self.segment.tokens else None

    def blocks(self) -> Iterable[tuple[Block, int]]:
        """Yield the blocks and how many tokens of each belong to it."""
        left = self.tokens
        for block in self.segment.blocks:
            if left <= 0:
                return
            yield block, min(block.tokens, left)
            left -= block.tokens


def evaluate(segments: Iterable[Segment]) -> None:
    """Compute every array, so that nothing keeps a larger one alive."""
    mx.eval([_arrays(segment) for segment in segments])


def _arrays(segment: Segment) -> Sequence[mx.array]:
    arrays = [a for block in segment.blocks for layer in block.layers for a in layer]
    return [*arrays, *(segment.snapshot.arrays if segment.snapshot else ())]
