"""Restores windows that nodes have given up when a request computes them anyway."""

from collections.abc import Mapping

from backend.cache.eviction.forecast import SegmentNode
from backend.cache.kv import Refill, Segment
from backend.cache.node_store import NodeStore
from backend.cache.token_key import TokenKey


def refill_windows(nodes: NodeStore, key: TokenKey, windows_from: int, refill: Refill) -> None:
    """Restore windows on a prefix that are worth more than the parts evicted for them.

    Args:
        nodes: The store.
        key: The prefix.
        windows_from: The first position whose windows `refill` has.
        refill: Returns a block with its windows.
    """
    for node in nodes.tree.match(key).nodes:
        first = max(node.end - nodes.worth.reach_tokens, 0)
        # Making room for one may have joined another with the node below it.
        if windows_from <= first and node.end <= len(key) and node.is_linked:
            _refill(nodes, node, first, refill)


def _refill(nodes: NodeStore, node: SegmentNode, first: int, refill: Refill) -> None:
    """Restore the windows of a node and its ancestors from a position on, if there is room."""
    if not nodes.worth.lacks_windows(node):
        return
    nbytes = _growth(_refilled(node, first, refill))
    if not nodes.make_room(nbytes, node, nodes.worth.of_refill(node, nbytes)):
        return
    # Making room may have thinned nodes of the path.
    values = _refilled(node, first, refill)
    if nodes.bytes + _growth(values) <= nodes.budget_bytes:
        nodes.fill(values)


def _refilled(node: SegmentNode, first: int, refill: Refill) -> dict[SegmentNode, Segment]:
    path = (above for above in node.lineage() if above.end > first)
    return {above: above.value.refilled(above.start, first, refill) for above in path}


def _growth(values: Mapping[SegmentNode, Segment]) -> int:
    return sum(value.nbytes - node.value.nbytes for node, value in values.items())
