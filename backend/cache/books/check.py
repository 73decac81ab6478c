"""Are the counts of a prompt cache's nodes right?"""

from backend.cache.eviction.worth import path_bytes
from backend.cache.node_store import NodeStore


def check_nodes(store: NodeStore) -> None:
    """Raise AssertionError unless bytes, tokens and names of nodes are right."""
    store.tree.check()
    nodes = list(store.tree.walk())
    if store.bytes != sum(node.value.nbytes for node in nodes):
        raise AssertionError("bytes are miscounted")
    if any(node.value.tokens != len(node.label) for node in nodes):
        raise AssertionError("a node holds other tokens than its own")
    used = [end for end, _ in store.used.values()]
    if not set(nodes).issuperset([*store.held.values(), *used, *store.pinned, *store.unsaved]):
        raise AssertionError("a node that is held, used, pinned or unsaved has been evicted")
    if any(not node.start <= store.unsaved.start(node) <= node.end for node in store.unsaved):
        raise AssertionError("a node lacks on disk what it does not hold")
    if store.bytes > max(store.budget_bytes, path_bytes(used)):
        raise AssertionError("more is stored than may be")
