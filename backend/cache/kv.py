"""The content of a prompt cache node: KV of its own tokens, and perhaps the state at its end.

All arrays are the store's own copies and never written to. Cuts are lazy: `evaluate` computes them.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self, TypeAlias

import mlx.core as mx

from backend.cache.radix import TokenKey

Arrays: TypeAlias = tuple[mx.array, ...]

MAX_NODE_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Size:
    """The size of arrays: a device limits their bytes, and Metal their number too."""

    nbytes: int = 0
    arrays: float = 0

    @classmethod
    def of(cls, arrays: Iterable[mx.array]) -> Self:
        """Return the size of arrays."""
        sizes = [array.nbytes for array in arrays]
        return cls(sum(sizes), len(sizes))

    def __add__(self, other: "Size") -> "Size":
        return Size(self.nbytes + other.nbytes, self.arrays + other.arrays)

    def __sub__(self, other: "Size") -> "Size":
        return Size(self.nbytes - other.nbytes, self.arrays - other.arrays)

    def fits(self, limit: "Size") -> bool:
        """Tell whether neither number is above a limit."""
        return self.nbytes <= limit.nbytes and self.arrays <= limit.arrays


def copied(arrays: Iterable[mx.array], start: int, stop: int) -> Arrays:
    """Copy positions of arrays [..., positions, width]; a slice would keep all of them alive."""
    return tuple(mx.contiguous(array[..., start:stop, :]) for array in arrays)


@dataclass(frozen=True, slots=True)
class Block:
    """KV of consecutive tokens.

    Attributes:
        layers: Per layer, arrays [..., tokens, width]; none for a layer without positions.
        has_windows: Whether `layers` includes those with a sliding window.
    """

    tokens: int
    layers: tuple[Arrays, ...]
    has_windows: bool = True

    @property
    def size(self) -> Size:
        """Of all arrays; evaluates none."""
        return Size.of(array for arrays in self.layers for array in arrays)

    def split(self, at: int) -> tuple["Block", "Block"]:
        """Return the first `at` tokens and the others, as separate arrays."""
        return self._cut(0, at), self._cut(at, self.tokens)

    def _cut(self, start: int, stop: int) -> "Block":
        layers = tuple(copied(arrays, start, stop) for arrays in self.layers)
        return Block(stop - start, layers, self.has_windows)


# Returns a block with its windows, given its first position.
Refill: TypeAlias = Callable[[Block, int], Block]


@dataclass(frozen=True, slots=True)
class State:
    """The state of a layer that cannot be cut, at one position; `None` is not there yet."""

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
    def size(self) -> Size:
        """Of all arrays; evaluates none."""
        return Size.of(self.arrays)


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
    def size(self) -> Size:
        """Of all arrays; evaluates none."""
        own = self.snapshot.size if self.snapshot else Size()
        return sum((block.size for block in self.blocks), own)

    def cut_arrays(self, at: int) -> float:
        """Return by how many arrays a split after `at` tokens adds to their number."""
        for block in self.blocks:
            if 0 < at < block.tokens:
                return block.size.arrays
            at -= block.tokens
        return 0

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
    """A node outside the tree; `start` is its first position."""

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


# Caches of positions grow in steps of this many tokens.
ALLOCATION_STEP_TOKENS = 256
# A pass of fewer tokens attends to each part separately; for a longer one, parts are joined.
MIN_JOINED_TOKENS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The first `tokens` positions of arrays that belong to the prompt cache.

    Attributes:
        arrays: Keys and values [1, heads, positions, width]; never written to.
    """

    arrays: Arrays
    tokens: int

    def cut(self) -> Arrays:
        """Return its positions, as views."""
        return tuple(array[..., : self.tokens, :] for array in self.arrays)


class RowKV:
    """A cache of one row that replaces upstream's `KVCache`: parts, then its own tail.

    Without parts it equals a `KVCache`. It returns keys and values as arrays, or itself if there
    are parts and few tokens: attention is then sent to `backend.engine.kv`.

    Attributes:
        keys: Of the tail, with room for more, [1, heads, capacity, width]; `None` if it is empty.
    """

    def __init__(self) -> None:
        self._parts: tuple[Part, ...] = ()
        self.shared = self.offset = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """The first positions; the tail stays as it is if others take their place."""
        return self._parts

    @parts.setter
    def parts(self, parts: tuple[Part, ...]) -> None:
        tail, self._parts = self.tail, parts
        self.shared = sum(part.tokens for part in parts)
        self.tail = tail

    @property
    def tail(self) -> int:
        """The number of positions in the tail."""
        return self.offset - self.shared

    @tail.setter
    def tail(self, tail: int) -> None:
        self.offset = self.shared + tail

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[object, object]:
        """Append [1, heads, width, head width], and return the keys and values for attention."""
        start = self.offset - self.shared
        stop = start + keys.shape[2]
        own_keys, own_values = self.keys, self.values
        if own_keys is None or own_values is None or stop > own_keys.shape[2]:
            own_keys = self.keys = _with_room(own_keys, keys, start)
            own_values = self.values = _with_room(own_values, values, start)
        own_keys[..., start:stop, :] = keys
        own_values[..., start:stop, :] = values
        self.offset = self.shared + stop
        if self._parts:
            return self.keys_and_values(keys.shape[2])
        return own_keys[..., :stop, :], own_values[..., :stop, :]

    def keys_and_values(self, width: int = 1) -> tuple[object, object]:
        """Return arrays of all positions; or this row, for a pass of few tokens after parts."""
        if self._is_read_by_part(width):
            return self, self
        return self.joined()

    def make_mask(
        self,
        N: int,  # noqa: N803 (upstream's parameters)
        return_array: bool = False,  # noqa: FBT001, FBT002
        window_size: int | None = None,
    ) -> mx.array | str | None:
        """Return the mask of upstream's `KVCache`."""
        from mlx_lm.models.cache import create_attention_mask

        if self._is_read_by_part(N):
            if window_size is None:
                return None
            positions = mx.arange(self.offset + N)
            latest = positions[self.offset :, None]
            return (positions <= latest) & (positions > latest - window_size)
        mask: mx.array | str | None = create_attention_mask(
            N, self.offset, return_array, window_size
        )
        return mask

    def tail_arrays(self) -> Arrays:
        """Return the positions of the tail as views; none if there never was one."""
        if self.keys is None or self.values is None:
            return ()
        return self.keys[..., : self.tail, :], self.values[..., : self.tail, :]

    def joined(self) -> tuple[mx.array, mx.array]:
        """Return keys and values of all positions; copies them if there are parts."""
        pieces = [*(part.cut() for part in self.parts), *filter(None, [self.tail_arrays()])]
        if len(pieces) == 1:
            keys, values = pieces[0]
        else:
            keys, values = (mx.concatenate(column, axis=-2) for column in zip(*pieces, strict=True))
        return keys, values

    def slices(self, start: int, stop: int) -> Arrays:
        """Copy positions, lazily."""
        shared = self.shared
        if start >= shared:
            arrays, start, stop = self.tail_arrays(), start - shared, stop - shared
        else:
            arrays = self.joined()
        return copied(arrays, start, stop)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the keys, for families that read positions from it."""
        rows, heads, _, width = (*self.tail_arrays(), *self.parts[0].arrays)[0].shape
        return rows, heads, self.offset, width

    def refer(self, parts: Sequence[Part]) -> None:
        """Use parts for the first positions; the tail keeps those after them."""
        tokens = sum(part.tokens for part in parts)
        left = self.offset - tokens
        rest = self.slices(tokens, self.offset) if left > 0 else ()
        self.parts = tuple(parts)
        self.keys, self.values = rest or (None, None)
        self.tail = max(left, 0)

    def is_trimmable(self) -> bool:
        """Allow any number of the latest positions to be dropped."""
        return True

    def trim(self, count: int) -> int:
        """Drop the latest positions of the tail, and return their number."""
        count = min(count, self.tail)
        self.tail -= count
        return count

    def empty(self) -> bool:
        """Tell whether there are no positions."""
        return not self.parts and self.keys is None

    @property
    def nbytes(self) -> int:
        """Bytes of the tail; parts belong to the prompt cache."""
        return sum(array.nbytes for array in self.state)

    @property
    def state(self) -> list[mx.array]:
        """The arrays of the tail."""
        return [array for array in (self.keys, self.values) if array is not None]

    def _is_read_by_part(self, width: int) -> bool:
        return bool(self.parts) and width < MIN_JOINED_TOKENS


def _with_room(buffer: mx.array | None, new: mx.array, start: int) -> mx.array:
    """Return a buffer with its first `start` positions, and room in whole steps for new ones."""
    steps = -(-new.shape[2] // ALLOCATION_STEP_TOKENS)
    shape = (*new.shape[:2], steps * ALLOCATION_STEP_TOKENS, new.shape[3])
    room = mx.zeros(shape, new.dtype)
    return room if buffer is None else mx.concatenate([buffer[..., :start, :], room], axis=2)


GROUP_SIZES = (128, 64, 32)
DEFAULT_GROUP_SIZE = 64

_WORD_BITS = 32


def group_size_for(widths: Iterable[int], largest: int = DEFAULT_GROUP_SIZE) -> int | None:
    """Return the largest group size, up to `largest`, that divides all widths, if any."""
    widths = tuple(widths)
    fitting = (
        size
        for size in GROUP_SIZES
        if size <= largest and all(width and width % size == 0 for width in widths)
    )
    return next(fitting, None)


@dataclass(frozen=True, slots=True)
class Packing:
    """The storage format of float arrays [..., tokens, width].

    Each token is packed separately, so packed arrays can be cut and joined like others.

    Attributes:
        bits: 4 or 8 per value; `None` leaves arrays unpacked.
    """

    bits: int | None = None

    def pack(self, arrays: Arrays) -> Arrays:
        """Lazily replace every array that can be packed by its words, scales and biases."""
        if self.bits is None:
            return arrays
        return tuple(part for array in arrays for part in _packed(array, self.bits))

    def unpack(self, arrays: Arrays) -> Arrays:
        """Lazily unpack arrays, in their original type."""
        return arrays if self.bits is None else tuple(_unpacked(arrays, self.bits))


UNPACKED = Packing()


def _packed(array: mx.array, bits: int) -> Arrays:
    size = group_size_for(array.shape[-1:])
    if size is None:
        return (array,)
    words, scales, biases = mx.quantize(array, group_size=size, bits=bits)
    return words, scales, biases


def _unpacked(arrays: Arrays, bits: int) -> Iterator[mx.array]:
    """Recognise packed arrays by their type: keys and values are never words."""
    left = iter(arrays)
    for array in left:
        if array.dtype != mx.uint32:
            yield array
            continue
        scales, biases = next(left), next(left)
        size = array.shape[-1] * _WORD_BITS // bits // scales.shape[-1]
        yield mx.dequantize(array, scales, biases, group_size=size, bits=bits)


@dataclass(frozen=True, slots=True)
class PlainArray:
    """The bytes of an array, in a contiguous buffer, with its type and shape."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class PlainSegment:
    """A segment without MLX; `outline` is JSON that describes the structure."""

    outline: str
    arrays: tuple[PlainArray, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.data.nbytes for array in self.arrays)

    @property
    def has_snapshot(self) -> bool:
        """Whether it has the state after its last token."""
        return json.loads(self.outline)["states"] is not None


def to_plain(segment: Segment) -> PlainSegment:
    """Return a view of a segment's arrays, which must be computed; copies nothing."""
    blocks = [
        {
            "tokens": block.tokens,
            "has_windows": block.has_windows,
            "arrays": [len(layer) for layer in block.layers],
        }
        for block in segment.blocks
    ]
    states = None
    if segment.snapshot is not None:
        states = [
            {"is_there": [a is not None for a in state.arrays], "numbers": list(state.numbers)}
            for state in segment.snapshot.states
        ]
    arrays = _arrays(segment)
    views = [array.view(mx.uint8) for array in arrays]
    mx.eval(views)
    plain = zip(arrays, views, strict=True)
    return PlainSegment(
        json.dumps({"blocks": blocks, "states": states}),
        tuple(PlainArray(_name(a.dtype), tuple(a.shape), memoryview(view)) for a, view in plain),
    )


def from_plain(plain: PlainSegment) -> Segment:
    """Build a segment with its own arrays, not yet computed.

    Raises:
        ValueError: The arrays do not match the outline.
    """
    outline = json.loads(plain.outline)
    arrays = map(_array, plain.arrays)
    blocks = tuple(_block(block, arrays) for block in outline["blocks"])
    snapshot = None
    if outline["states"] is not None:
        snapshot = Snapshot(tuple(_state(state, arrays) for state in outline["states"]))
    if next(arrays, None) is not None:
        raise ValueError("there are more arrays than the outline tells of")
    return Segment(blocks, snapshot)


def _block(outline: dict[str, Any], arrays: Iterator[mx.array]) -> Block:
    layers = tuple(_take(count, arrays) for count in outline["arrays"])
    return Block(outline["tokens"], layers, outline["has_windows"])


def _state(outline: dict[str, Any], arrays: Iterator[mx.array]) -> State:
    taken = tuple(_take(1, arrays)[0] if there else None for there in outline["is_there"])
    return State(taken, tuple(outline["numbers"]))


def _take(count: int, arrays: Iterator[mx.array]) -> tuple[mx.array, ...]:
    taken = tuple(islice(arrays, count))
    if len(taken) != count:
        raise ValueError("arrays are missing")
    return taken


def _array(plain: PlainArray) -> mx.array:
    flat = mx.array(plain.data).view(getattr(mx, plain.dtype))
    return flat.reshape(plain.shape)


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
