"""A cache that evicts the least recently used value."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class LastUsed(Generic[_Key, _Value]):
    """Keeps the most recently used values; thread-safe.

    Attributes:
        size: Of all of them.
    """

    def __init__(
        self,
        capacity: float,
        max_size: int = 0,
        size_of: Callable[[_Key, _Value], int] = lambda _key, _value: 0,
    ) -> None:
        """Start empty; one value may exceed `max_size`; without `size_of` values have none."""
        self._capacity = capacity
        self._max_size = max_size
        self._size_of = size_of
        self.size = 0
        self._values: OrderedDict[_Key, _Value] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: _Key) -> _Value | None:
        """Return the value of a key and mark it as used."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def keep(self, key: _Key, value: _Value) -> _Value:
        """Store a value, evicting another one if full, and return it."""
        with self._lock:
            self.size += 0 if key in self._values else self._size_of(key, value)
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > 1 and self._is_full:
                self.size -= self._size_of(*self._values.popitem(last=False))
        return value

    @property
    def _is_full(self) -> bool:
        return len(self._values) > self._capacity or self.size > self._max_size
