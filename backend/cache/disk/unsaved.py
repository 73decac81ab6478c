"""The nodes of a prompt cache that the disk lacks, wholly or in part."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from backend.cache.radix import Divisible, Node, RadixTree
from backend.cache.token_key import TokenKey

V = TypeVar("V", bound=Divisible)


class UnsavedNodes(Generic[V]):
    """Nodes with the first token that the disk lacks: a node's end stands for its snapshot alone.

    New ones are written when there is time. Those that the disk has lost, for want of room or by a
    failure, are written only when memory gives them up: a disk that is smaller than memory would
    be written without end.
    """

    def __init__(self) -> None:
        self._starts: dict[Node[V], int] = {}
        self._new: dict[Node[V], None] = {}

    def __contains__(self, node: Node[V]) -> bool:
        """Tell whether the disk lacks some of a node."""
        return node in self._starts

    def __iter__(self) -> Iterator[Node[V]]:
        """Yield the nodes of which the disk lacks some."""
        return iter(self._starts)

    @property
    def new(self) -> list[Node[V]]:
        """The nodes that the disk has never had."""
        return list(self._new)

    @property
    def has_new(self) -> bool:
        """Whether there are nodes that the disk has never had."""
        return bool(self._new)

    def start(self, node: Node[V]) -> int:
        """Return the first token that the disk lacks of a node that is here."""
        return self._starts[node]

    def add(self, node: Node[V], start: int) -> None:
        """Note that a node has something new from a token on."""
        self._starts[node] = min(start, self._starts.get(node, start))
        self._new[node] = None

    def note_lost(self, tree: RadixTree[V], key: TokenKey, start: int) -> None:
        """Note that the disk no longer has the tokens of `key` from `start` on, if memory has."""
        found = tree.match(key)
        for node, tokens in found.spans():
            is_inside = start < node.start + tokens
            if is_inside or node.end == len(key) == start:
                first = max(start, node.start)
                self._starts[node] = min(first, self._starts.get(node, first))

    def discard(self, node: Node[V]) -> None:
        """Forget a node: the disk has it, or memory no longer."""
        self._starts.pop(node, None)
        self._new.pop(node, None)

    def divide(self, upper: Node[V], lower: Node[V]) -> None:
        """Note that the first tokens of `lower` have become a node of their own."""
        start = self._starts.get(lower)
        if start is None or start >= upper.end:
            return
        self._starts[upper], self._starts[lower] = start, upper.end
        if lower in self._new:
            self._new[upper] = None

    def may_join(self, upper: Node[V], lower: Node[V]) -> bool:
        """Tell whether the disk lacks either nothing of `upper` or all of `lower`."""
        is_saved = self._starts.get(upper, upper.end) >= upper.end
        return is_saved or self._starts.get(lower, lower.end) <= lower.start

    def join(self, upper: Node[V], lower: Node[V]) -> None:
        """Note that `upper` has become a part of `lower`; `may_join` said that it may."""
        start = self._starts.get(upper)
        if start is not None and start < upper.end:
            self._starts[lower] = start
            if upper in self._new:
                self._new[lower] = None
        self.discard(upper)
