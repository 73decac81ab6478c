"""The reference graph of rules: cycles and chains, computed with loops, not recursion."""

from collections.abc import Collection, Iterable, Iterator, Mapping

Edges = Mapping[str, Collection[str]]


def components(edges: Edges) -> list[list[str]]:
    """Return the strongly connected components, each after its successors.

    Kosaraju's algorithm, as in Aho, Hopcroft, Ullman: Data Structures and Algorithms (1983).

    Args:
        edges: Successors of every node, which are nodes too.
    """
    seen: set[str] = set()
    finished = [node for start in edges for node in _visited(start, edges, seen)]
    sources: dict[str, list[str]] = {node: [] for node in edges}
    for node, targets in edges.items():
        for target in targets:
            sources[target].append(node)
    seen.clear()
    found = [list(_visited(start, sources, seen)) for start in reversed(finished)]
    return [component for component in reversed(found) if component]


def reachable(starts: Iterable[str], edges: Edges) -> set[str]:
    """Return the nodes reachable from `starts`, including these."""
    seen: set[str] = set()
    return {node for start in starts for node in _visited(start, edges, seen)}


def is_cycle(component: Collection[str], edges: Edges) -> bool:
    """Return whether a component contains a cycle."""
    return len(component) > 1 or any(node in edges[node] for node in component)


def longest_chain(edges: Edges, weights: Mapping[str, int]) -> int:
    """Return the greatest weight of a path; a cycle counts with the weight of all its nodes."""
    heaviest: dict[str, int] = {}
    for component in components(edges):
        beyond = {target for node in component for target in edges[node]} - set(component)
        weight = sum(weights[node] for node in component)
        total = weight + max((heaviest[target] for target in beyond), default=0)
        heaviest.update(dict.fromkeys(component, total))
    return max(heaviest.values(), default=0)


def _visited(start: str, edges: Edges, seen: set[str]) -> Iterator[str]:
    """Walk depth first over nodes not in `seen`; yield each node after its successors."""
    if start in seen:
        return
    seen.add(start)
    path = [(start, iter(edges[start]))]
    while path:
        node, targets = path[-1]
        target = next((target for target in targets if target not in seen), None)
        if target is None:
            path.pop()
            yield node
        else:
            seen.add(target)
            path.append((target, iter(edges[target])))
