"""The nodes of a prompt cache within a budget of bytes: what is kept, thinned, evicted, unsaved.

Knows no requests but by the name of who holds a path, and takes no lock: its owner does.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from backend.cache.kv import Segment, Snapshot
from backend.cache.radix import Match, Node, RadixTree
from backend.cache.token_key import TokenKey

MAX_KEPT_SHARE = 0.5
# The ends of the last prompt and its reply, and where the next one is going to branch.
NEAR_SNAPSHOTS = 2

SegmentNode: TypeAlias = Node[Segment]


@dataclass(frozen=True, slots=True)
class Thinning:
    """How a segment in the middle of a conversation gives up what only cuts inside it need.

    Attributes:
        thin: Returns the segment without.
        reach_tokens: A segment so near to the end of its path is needed whole.
        has_snapshots: Whether the last snapshots of a path are needed as well.
    """

    thin: Callable[[Segment], Segment]
    reach_tokens: int
    has_snapshots: bool


@dataclass(frozen=True, slots=True)
class LooseNode:
    """A node by itself.

    Attributes:
        key: The tokens from the root to the node's end.
        start: Where the node begins.
    """

    key: TokenKey
    start: int
    segment: Segment


class NodeStore:
    """Nodes on a radix tree.

    Attributes:
        tree: To be read by the owner, and changed here only.
        bytes: What all nodes hold; at most `budget_bytes`.
        held: By owner, the deepest node of a path that must not be evicted.
        unsaved: Nodes that nobody else holds.
        version: Counts the insertions.
    """

    def __init__(self, budget_bytes: int, thinning: Thinning | None = None) -> None:
        """Start empty.

        Args:
            budget_bytes: What all nodes together may hold.
            thinning: What can be given up before whole nodes are; `None` is nothing.
        """
        self.tree: RadixTree[Segment] = RadixTree()
        self.budget_bytes = budget_bytes
        self.bytes = 0
        self.held: dict[str, SegmentNode] = {}
        self.unsaved: dict[SegmentNode, None] = {}
        self.version = 0
        self.evictions = 0
        self._thinning = thinning
        self._far: OrderedDict[SegmentNode, None] = OrderedDict()
        self._kept: OrderedDict[SegmentNode, None] = OrderedDict()
        self._divided: list[Segment] = []
        self._evicted: list[LooseNode] = []

    def insert(self, key: TokenKey, start: int, segment: Segment) -> SegmentNode | None:
        """Store what the tree lacks of a prefix, and return the node at its end.

        Args:
            key: The whole prefix.
            start: Where `segment` begins.
            segment: KV of `key[start:]`, perhaps none, and perhaps the state behind it.

        Returns:
            `None` if what was before `start` is no longer there, or if there is no room.
        """
        found = self.tree.match(key)
        if found.length < start:
            return None
        if found.length > start:
            segment = _rest(segment, found.length - start)
        if not self._make_room(segment.nbytes, found.last):
            return None
        found = self.tree.match(key)
        if found.length == len(key):
            return self._attach(found, segment.snapshot)
        return self._add(key, found, segment)

    def keep(self, key: TokenKey) -> None:
        """Evict a prefix after everything else; no effect unless it is stored whole."""
        found = self.tree.match(key)
        if found.last is None or found.length < len(key):
            return
        node = self._ending_at(found)
        self.tree.keep(node)
        self._kept[node] = None
        self._kept.move_to_end(node)
        while len(self._kept) > 1 and _path_bytes(self._kept) > MAX_KEPT_SHARE * self.budget_bytes:
            oldest, _ = self._kept.popitem(last=False)
            self.tree.unkeep(oldest)

    def resize(self, budget_bytes: int) -> None:
        """Hold at most so many bytes from now on.

        What is too much is evicted, in the end also paths that are held: nothing is copied
        from them any more, but what continues them finds no place.
        """
        self.budget_bytes = budget_bytes
        if self.bytes <= budget_bytes or self._make_room(0, None):
            return
        self.held.clear()
        self._evict_down_to(budget_bytes, set())

    def take_divided(self) -> list[Segment]:
        """Return the segments whose arrays were cut since the last call: they want computing."""
        divided, self._divided = self._divided, []
        return divided

    def take_evicted(self) -> list[LooseNode]:
        """Return the nodes evicted since the last call that nobody else holds."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def check(self) -> None:
        """Raise AssertionError unless the books balance."""
        self.tree.check()
        nodes = list(self.tree.walk())
        if self.bytes != sum(node.value.nbytes for node in nodes):
            raise AssertionError("bytes are miscounted")
        if any(node.value.tokens != len(node.label) for node in nodes):
            raise AssertionError("a node holds other tokens than its own")
        if not set(nodes).issuperset([*self.held.values(), *self._kept, *self.unsaved]):
            raise AssertionError("a node that is held, kept or unsaved has been evicted")
        if self.bytes > self.budget_bytes:
            raise AssertionError("more is stored than may be")

    def _add(self, key: TokenKey, found: Match[Segment], segment: Segment) -> SegmentNode:
        if found.last is not None:
            self._ending_at(found)
        node = self.tree.insert(key, found.length, segment)
        # Perhaps the rest of a longer one.
        self._divided.append(segment)
        self.bytes += segment.nbytes
        self.version += 1
        self._note_far(node)
        return node

    def _attach(self, found: Match[Segment], snapshot: Snapshot | None) -> SegmentNode:
        """Put a snapshot where a match ends, unless one is there."""
        node = self._ending_at(found)
        if snapshot is not None and node.value.snapshot is None:
            self.tree.replace(node, Segment(node.value.blocks, snapshot))
            self.bytes += snapshot.nbytes
            self.version += 1
        self.tree.touch(node)
        return node

    def _ending_at(self, found: Match[Segment]) -> SegmentNode:
        """Return a node that ends where a match does: one is split for it if need be."""
        node = found.nodes[-1]
        if node.end == found.length:
            return node
        upper = self.tree.split_at(node, found.length - node.start)
        self._divided += [upper.value, node.value]
        if node in self.unsaved:
            self.unsaved[upper] = None
        return upper

    def _make_room(self, needed: int, path_end: SegmentNode | None) -> bool:
        """Thin, then evict the least recent leaves, until so many bytes fit beside the others.

        What cannot fit beside the paths that are held evicts nothing.
        """
        held = {*self.held.values(), *filter(None, (path_end,))}
        while self._far and self.bytes + needed > self.budget_bytes:
            self._thin_oldest(held)
        if self.bytes + needed <= self.budget_bytes:
            return True
        if _path_bytes(held) + needed > self.budget_bytes:
            return False
        return self._evict_down_to(self.budget_bytes - needed, held)

    def _evict_down_to(self, nbytes: int, held: set[SegmentNode]) -> bool:
        """Evict the least recent leaves until no more than so much is left, if that can be."""
        while self.bytes > nbytes:
            leaf = self.tree.least_recent(skip=held)
            if leaf is None:
                return False
            self._evict(leaf, held)
        return True

    def _evict(self, leaf: SegmentNode, held: set[SegmentNode]) -> None:
        if leaf in self.unsaved:
            self._evicted.append(LooseNode(leaf.key, leaf.start, leaf.value))
        parent = leaf.parent
        self.bytes -= self.tree.remove(leaf, skip=held).nbytes
        self._kept.pop(leaf, None)
        self.unsaved.pop(leaf, None)
        self.evictions += 1
        if parent in self.unsaved and not parent.is_linked:
            # It has become a part of its other child.
            del self.unsaved[parent]
            self.unsaved[self.tree.match(parent.key).nodes[-1]] = None

    def _note_far(self, node: SegmentNode) -> None:
        """Remember the nearest node above that lies too far back to be cut soon."""
        if self._thinning is None:
            return
        snapshots = 0
        for above in node.lineage():
            is_far = snapshots > NEAR_SNAPSHOTS or not self._thinning.has_snapshots
            if is_far and node.end - above.end > self._thinning.reach_tokens:
                self._far[above] = None
                return
            snapshots += above.value.snapshot is not None

    def _thin_oldest(self, held: set[SegmentNode]) -> None:
        """Thin a node, unless prompts have branched, or may again, so near that it is needed."""
        node, _ = self._far.popitem(last=False)
        if self._thinning is None or not node.is_linked or node in held:
            return
        if _is_near_branch(node, self._thinning.reach_tokens):
            return
        thinned = self._thinning.thin(node.value)
        self.bytes -= node.value.nbytes - thinned.nbytes
        self.tree.replace(node, thinned)


def _is_near_branch(node: SegmentNode, reach_tokens: int) -> bool:
    """Tell whether prompts branch, or a system prompt ends, at a node or within reach below it."""
    below = node
    while below.end - node.end <= reach_tokens:
        if below.is_marked or len(below.children) != 1:
            return True
        (below,) = below.children.values()
    return False


def _path_bytes(ends: Iterable[SegmentNode]) -> int:
    """Return what is held by nodes and all that is above them, what they share once."""
    nodes = {node for end in ends for node in end.lineage()}
    return sum(node.value.nbytes for node in nodes)


def _rest(segment: Segment, known: int) -> Segment:
    """Return a segment without its first tokens."""
    if known >= segment.tokens:
        return Segment((), segment.snapshot)
    return segment.split(known)[1]
