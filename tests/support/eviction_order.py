"""The leaves of a radix tree in the order in which they would be evicted."""

from collections.abc import Container, Iterator

from backend.cache.radix import Node, RadixTree, V


def leaves(tree: RadixTree[V]) -> Iterator[Node[V]]:
    """Yield the leaves; the tree must not change meanwhile."""
    return (node for node in tree.by_recency() if not node.children)


def least_recent(tree: RadixTree[V], skip: Container[Node[V]] = ()) -> Node[V] | None:
    """Return the leaf to evict first, those in `skip` left out; None: there is no other."""
    return next((leaf for leaf in leaves(tree) if leaf not in skip), None)
