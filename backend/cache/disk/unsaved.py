"""The nodes of a prompt cache that are not on disk, wholly or in part."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from backend.cache.radix import Divisible, Node, RadixTree
from backend.cache.token_key import TokenKey

V = TypeVar("V", bound=Divisible)


class UnsavedNodes(Generic[V]):
    """Nodes with their first token not on disk: a node's end stands for its snapshot alone.

    New ones are written when there is time. Those that the disk has lost, for lack of space or by a
    failure, are written only when memory evicts them: a disk that is smaller than memory would
    otherwise be written endlessly.
    """

    def __init__(self) -> None:
        self._starts: dict[Node[V], int] = {}
        self._new: dict[Node[V], None] = {}

    def __contains__(self, node: Node[V]) -> bool:
        """Tell whether some of a node is not on disk."""
        return node in self._starts

    def __iter__(self) -> Iterator[Node[V]]:
        """Yield the nodes that are not completely on disk."""
        return iter(self._starts)

    @property
    def new(self) -> list[Node[V]]:
        """The nodes that were never on disk."""
        return list(self._new)

    @property
    def has_new(self) -> bool:
        """Whether there are nodes that were never on disk."""
        return bool(self._new)

    def start(self, node: Node[V]) -> int:
        """Return a contained node's first token that is not on disk."""
        return self._starts[node]

    def add(self, node: Node[V], start: int) -> None:
        """Record that a node is new from a token on."""
        self._starts[node] = min(start, self._starts.get(node, start))
        self._new[node] = None

    def note_lost(self, tree: RadixTree[V], key: TokenKey, start: int) -> None:
        """Record that the disk lost the tokens of `key` from `start` on, if memory has them."""
        found = tree.match(key)
        for node, tokens in found.spans():
            is_inside = start < node.start + tokens
            if is_inside or node.end == len(key) == start:
                first = max(start, node.start)
                self._starts[node] = min(first, self._starts.get(node, first))

    def discard(self, node: Node[V]) -> None:
        """Forget a node: it is on disk, or no longer in memory."""
        self._starts.pop(node, None)
        self._new.pop(node, None)

    def divide(self, upper: Node[V], lower: Node[V]) -> None:
        """Record that the first tokens of `lower` have become a separate node."""
        start = self._starts.get(lower)
        if start is None or start >= upper.end:
            return
        self._starts[upper], self._starts[lower] = start, upper.end
        if lower in self._new:
            self._new[upper] = None

    def may_join(self, upper: Node[V], lower: Node[V]) -> bool:
        """Tell whether `upper` is completely on disk or `lower` not at all."""
        is_saved = self._starts.get(upper, upper.end) >= upper.end
        return is_saved or self._starts.get(lower, lower.end) <= lower.start

    def join(self, upper: Node[V], lower: Node[V]) -> None:
        """Record that `upper` has become a part of `lower`; requires `may_join`."""
        start = self._starts.get(upper)
        if start is not None and start < upper.end:
            self._starts[lower] = start
            if upper in self._new:
                self._new[lower] = None
        self.discard(upper)
