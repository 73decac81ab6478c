"""An order from the least to the most recently used, changed in constant time.

The list is intrusive: links are part of the items. Unlike in a dict, an item can be placed next to
any other. Nothing references a removed item, so its memory is freed at once.
"""

from collections.abc import Iterator
from typing import Generic, TypeVar, cast


class Link:
    """Base class of an item of one `RecencyList`; in none at first."""

    __slots__ = ("newer", "older")

    def __init__(self) -> None:
        self.older: Link | None = None
        self.newer: Link | None = None

    @property
    def is_linked(self) -> bool:
        """Whether this is in a list."""
        return self.newer is not None

    def place_after(self, older: "Link") -> None:
        """Move right after `older`, as the more recent of the two."""
        self._place(older, older.newer)

    def place_before(self, newer: "Link") -> None:
        """Move right before `newer`, as the less recent of the two."""
        self._place(newer.older, newer)

    def unlink(self) -> None:
        """Leave the list, if this is in one."""
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
        """Make `item` the most recent, wherever it was before."""
        item.unlink()
        item.place_before(self._ends)
