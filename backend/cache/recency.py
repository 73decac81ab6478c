"""An order from the least to the most recently used, changed in constant time.

The links are part of the items (an intrusive list): an item can stand next to any other one, which
a dict cannot give, and one that left is referenced by nothing, so its memory is free at once.
"""

from collections.abc import Iterator
from typing import Generic, TypeVar, cast


class Link:
    """What an item inherits to stand in one `RecencyList`; in none at first."""

    __slots__ = ("newer", "older")

    def __init__(self) -> None:
        self.older: Link | None = None
        self.newer: Link | None = None

    @property
    def is_linked(self) -> bool:
        """Whether this stands in a list."""
        return self.newer is not None

    def place_after(self, older: "Link") -> None:
        """Stand right behind `older`, as the more recent of the two."""
        self._place(older, older.newer)

    def place_before(self, newer: "Link") -> None:
        """Stand right in front of `newer`, as the less recent of the two."""
        self._place(newer.older, newer)

    def unlink(self) -> None:
        """Leave the list; no effect in none."""
        if self.older is not None and self.newer is not None:
            self.older.newer, self.newer.older = self.newer, self.older
        self.older = self.newer = None

    def _place(self, older: "Link | None", newer: "Link | None") -> None:
        if older is None or newer is None:
            raise ValueError("the neighbour stands in no list")
        self.older, self.newer = older, newer
        older.newer = newer.older = self


LinkT = TypeVar("LinkT", bound=Link)


class RecencyList(Generic[LinkT]):
    """Items from the least to the most recent; must not change while it is iterated."""

    def __init__(self) -> None:
        self._ends = Link()
        self._ends.older = self._ends.newer = self._ends

    def __iter__(self) -> Iterator[LinkT]:
        link = self._ends.newer
        while link is not None and link is not self._ends:
            yield cast("LinkT", link)
            link = link.newer

    def append(self, item: LinkT) -> None:
        """Make `item` the most recent, wherever it stood before."""
        item.unlink()
        item.place_before(self._ends)
