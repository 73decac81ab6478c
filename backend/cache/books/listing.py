"""The nodes of a prompt cache as people are told of them."""

from typing import Any, TypeAlias

from backend.cache.eviction.forecast import SegmentNode
from backend.cache.eviction.worth import path_nodes
from backend.cache.node_store import NodeStore
from backend.core.prompt import Place
from backend.core.prompt_cache import ListingRequest, StoredPrefix

_MIB = 2**20

Worths: TypeAlias = dict[SegmentNode, float]


def list_prefixes(
    nodes: NodeStore, request: ListingRequest, *, has_disk: bool
) -> tuple[StoredPrefix, ...]:
    """Return the nodes that would go last, with all that they go on from.

    Args:
        nodes: The nodes; looked at once each.
        request: How many are listed, and how much of them.
        has_disk: Whether nodes that somebody else holds as well are on disk.
    """
    worths = nodes.worth.of_subtrees(nodes.tree)
    numbers = _numbers(nodes, worths, request.max_prefixes)
    in_use = path_nodes([*nodes.held.values(), *(end for end, _ in nodes.used.values())])
    return tuple(
        StoredPrefix(
            number=number,
            parent=numbers[node.parent] if node.parent else 0,
            worth=worths[node] * _MIB,
            idle_requests=nodes.now - node.used_at,
            is_in_use=node in in_use,
            is_on_disk=has_disk and node not in nodes.unsaved,
            head=tuple(node.label[: request.head_tokens]),
            **_own_facts(node),
        )
        for node, number in numbers.items()
    )


def _own_facts(node: SegmentNode) -> dict[str, Any]:
    return {
        "start": node.start,
        "tokens": len(node.label),
        "bytes": node.value.nbytes,
        "place": Place.SYSTEM if node.is_pin else node.place,
        "hits": node.hits,
        "is_pinned": node.is_pinned,
        "has_state": node.value.snapshot is not None,
    }


def _numbers(nodes: NodeStore, worths: Worths, most: int) -> dict[SegmentNode, int]:
    """Return the nodes that would go last, numbered from 1 on, parents before their children."""

    def rank(node: SegmentNode) -> tuple[bool, float, int]:
        return node.is_pinned, worths[node], node.used_at

    # No parent is less pinned, worth or recent than its children, and it comes first among equals.
    order = list(nodes.tree.walk())
    kept = set(sorted(order, key=rank, reverse=True)[:most])
    return {node: number for number, node in enumerate(filter(kept.__contains__, order), 1)}
