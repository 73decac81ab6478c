"""A store that forgets the least recently used."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class LastUsed(Generic[_Key, _Value]):
    """Keeps the values of the keys that were used last; safe from any thread."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._values: OrderedDict[_Key, _Value] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: _Key) -> _Value | None:
        """Return the value of a key, and count it as used."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def keep(self, key: _Key, value: _Value) -> _Value:
        """Keep a value, drop another one if need be, and return it."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            if len(self._values) > self._capacity:
                self._values.popitem(last=False)
        return value
