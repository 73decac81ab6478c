"""The content of a prompt cache node: KV of its own tokens, and perhaps the state at its end.

All arrays are the store's own copies and never written to. Cuts are lazy: `evaluate` computes them.
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
        tokens: Their number.
        layers: Per layer, arrays [..., tokens, width]; none for a layer without positions.
        has_windows: Whether `layers` includes those with a sliding window.
    """

    tokens: int
    layers: tuple[Arrays, ...]
    has_windows: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; evaluates none."""
        return sum(array.nbytes for arrays in self.layers for array in arrays)

    def split(self, at: int) -> tuple["Block", "Block"]:
        """Return the first `at` tokens and the others, as separate arrays."""
        return self._cut(0, at), self._cut(at, self.tokens)

    def _cut(self, start: int, stop: int) -> "Block":
        layers = tuple(
            tuple(mx.contiguous(array[..., start:stop, :]) for array in arrays)
            for arrays in self.layers
        )
        return Block(stop - start, layers, self.has_windows)


# Returns a block with its windows, given its first position.
Refill: TypeAlias = Callable[[Block, int], Block]


@dataclass(frozen=True, slots=True)
class State:
    """The state, at one position, of a layer that cannot be cut by position.

    Attributes:
        arrays: `None` for one that does not exist yet.
        numbers: Its counters.
    """

    arrays: tuple[mx.array | None, ...]
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The states of all layers that have one, at one position."""

    states: tuple[State, ...]

    @property
    def arrays(self) -> Arrays:
        """All existing arrays."""
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
        """The number of its tokens."""
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
        """Return the segment with windows from a position on.

        Args:
            start: The segment's first position.
            first: The first position that gets its windows.
            refill: Returns a block with its windows.
        """
        if start < first < start + self.tokens:
            head, tail = self.split(first - start)
            return Segment(head.blocks + tail.refilled(first, first, refill).blocks, self.snapshot)
        blocks: list[Block] = []
        for block in self.blocks:
            blocks.append(block if block.has_windows else refill(block, start))
            start += block.tokens
        return Segment(tuple(blocks), self.snapshot)

    def after(self, known: int) -> "Segment":
        """Return the part after the first `known` tokens: only the snapshot if that is all."""
        return Segment((), self.snapshot) if known >= self.tokens else self.split(known)[1]

    def joined(self, other: "Segment") -> "Segment | None":
        """Return both as one; `None` if that is too long for a node, or has a snapshot inside."""
        if self.snapshot is not None or self.tokens + other.tokens > MAX_NODE_TOKENS:
            return None
        return Segment(self.blocks + other.blocks, other.snapshot)


@dataclass(frozen=True, slots=True)
class LooseNode:
    """A node outside the tree.

    Attributes:
        key: The tokens from the root to the node's end.
        start: The node's first position.
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
        """The state at its end; none if the segment continues."""
        return self.segment.snapshot if self.tokens == self.segment.tokens else None

    def blocks(self) -> Iterable[tuple[Block, int]]:
        """Yield each block with the number of its tokens in the piece."""
        left = self.tokens
        for block in self.segment.blocks:
            if left <= 0:
                return
            yield block, min(block.tokens, left)
            left -= block.tokens


def evaluate(segments: Iterable[Segment]) -> None:
    """Compute every array, so that none keeps a larger one alive."""
    mx.eval([_arrays(segment) for segment in segments])


def _arrays(segment: Segment) -> Sequence[mx.array]:
    arrays = [a for block in segment.blocks for layer in block.layers for a in layer]
    return [*arrays, *(segment.snapshot.arrays if segment.snapshot else ())]
