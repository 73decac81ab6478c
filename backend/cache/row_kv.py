"""Keys and values of one row that uses its first positions in place, in the prompt cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from backend.cache.kv import Arrays

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
        shared: The number of positions in all parts.
        keys: Of the tail, with room for more, [1, heads, capacity, width]; `None` if it is empty.
        values: Like `keys`.
        offset: The number of positions of the row.
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
            return None if window_size is None else _window_mask(N, self.offset, window_size)
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
        return tuple(mx.contiguous(array[..., start:stop, :]) for array in arrays)

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


def _window_mask(width: int, offset: int, window: int) -> mx.array:
    positions = mx.arange(offset + width)
    latest = mx.arange(offset, offset + width)[:, None]
    return (positions <= latest) & (positions > latest - window)
