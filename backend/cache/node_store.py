"""Stores, thins and evicts the nodes of a prompt cache within a budget of bytes and arrays.

It knows requests only by name, as owners of paths.
"""

import math
from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import count

from backend.cache.eviction import (
    Forecast,
    SegmentNode,
    Taken,
    Thinning,
    Worth,
    path_size,
    path_tokens,
    total_size,
)
from backend.cache.kv import LooseNode, Refill, Segment, Size, Snapshot
from backend.cache.radix import Match, RadixTree, TokenKey
from backend.core.prompt import Place


class UnsavedNodes:
    """Nodes with their first token not on disk: a node's end stands for its snapshot alone.

    New ones are written when there is time. Those that the disk has lost, for lack of space or by a
    failure, are written only when memory evicts them: a disk that is smaller than memory would
    otherwise be written endlessly.
    """

    def __init__(self) -> None:
        self._starts: dict[SegmentNode, int] = {}
        self._new: dict[SegmentNode, None] = {}

    def __contains__(self, node: SegmentNode) -> bool:
        """Tell whether some of a node is not on disk."""
        return node in self._starts

    def __iter__(self) -> Iterator[SegmentNode]:
        return iter(self._starts)

    @property
    def new(self) -> list[SegmentNode]:
        """The nodes that were never on disk."""
        return list(self._new)

    @property
    def has_new(self) -> bool:
        """Whether there are nodes that were never on disk."""
        return bool(self._new)

    def start(self, node: SegmentNode) -> int:
        """Return a contained node's first token that is not on disk."""
        return self._starts[node]

    def add(self, node: SegmentNode, start: int) -> None:
        """Record that a node is new from a token on."""
        self._starts[node] = min(start, self._starts.get(node, start))
        self._new[node] = None

    def note_lost(self, tree: RadixTree[Segment], key: TokenKey, start: int) -> None:
        """Record that the disk lost the tokens of `key` from `start` on, if memory has them."""
        found = tree.match(key)
        for node, tokens in found.spans():
            is_inside = start < node.start + tokens
            if is_inside or node.end == len(key) == start:
                first = max(start, node.start)
                self._starts[node] = min(first, self._starts.get(node, first))

    def discard(self, node: SegmentNode) -> None:
        """Forget a node: it is on disk, or no longer in memory."""
        self._starts.pop(node, None)
        self._new.pop(node, None)

    def divide(self, upper: SegmentNode, lower: SegmentNode) -> None:
        """Record that the first tokens of `lower` have become a separate node."""
        start = self._starts.get(lower)
        if start is None or start >= upper.end:
            return
        self._starts[upper], self._starts[lower] = start, upper.end
        if lower in self._new:
            self._new[upper] = None

    def may_join(self, upper: SegmentNode, lower: SegmentNode) -> bool:
        """Tell whether `upper` is completely on disk or `lower` not at all."""
        is_saved = self._starts.get(upper, upper.end) >= upper.end
        return is_saved or self._starts.get(lower, lower.end) <= lower.start

    def join(self, upper: SegmentNode, lower: SegmentNode) -> None:
        """Record that `upper` has become a part of `lower`; requires `may_join`."""
        start = self._starts.get(upper)
        if start is not None and start < upper.end:
            self._starts[lower] = start
            if upper in self._new:
                self._new[lower] = None
        self.discard(upper)


MAX_PINNED_SHARE = 0.5
# A node that loses one of this many children is joined with the other.
_JOINED_AT = 2


class NodeStore:
    """Nodes in a radix tree.

    Attributes:
        tree: The owner may read it; changed only here.
        size: Of all nodes; within the budget, but for arrays cut while all paths are held.
        held: By owner, the deepest node of a path that must not be evicted.
        used: By owner, the deepest node of a path that is used in place, and the number of its
            tokens in use: evicting it would free nothing.
        pinned: Ends of system prompts, least recent first.
        unsaved: Nodes that are not on disk, wholly or in part.
        version: Counts insertions.
    """

    def __init__(self, budget: Size, forecast: Forecast, thinning: Thinning) -> None:
        self.tree: RadixTree[Segment] = RadixTree()
        self.budget = budget
        self.size = Size()
        self.held: dict[str, SegmentNode] = {}
        self.used: dict[str, tuple[SegmentNode, int]] = {}
        self.unsaved = UnsavedNodes()
        self.version = 0
        self.now = 0
        self.evictions = 0
        self.worth = Worth(forecast, thinning, budget.nbytes / max(budget.arrays, 1))
        self.pinned: OrderedDict[SegmentNode, None] = OrderedDict()
        self._used_ends: set[SegmentNode] = set()
        self._divided: list[Segment] = []
        self._evicted: list[LooseNode] = []

    def insert(
        self,
        key: TokenKey,
        start: int,
        segment: Segment,
        place: Place = Place.INNER,
        *,
        is_awaited: bool = False,
    ) -> SegmentNode | None:
        """Store the missing part of a prefix, and return the node at its end.

        Args:
            start: The first position of `segment`.
            segment: KV of `key[start:]`, perhaps none, and perhaps the state after it.
            is_awaited: Whether a present request waits for it.

        Returns:
            `None` if the prefix before `start` is no longer stored, or if there is no room.
        """
        found = self.tree.match(key)
        if found.length < start:
            return None
        if found.length > start:
            segment = segment.after(found.length - start)
        likely = 1.0 if is_awaited else self.worth.forecast.newcomer(key, place)
        size = segment.size
        worth = self.worth.of_newcomer(key, found, likely, size)
        if not self.make_room(size + _cut_size(found), found.last, worth):
            return None
        found = self.tree.match(key)
        if found.length == len(key):
            node = self._attach(found, segment.snapshot)
        else:
            node = self._add(key, found, segment)
        if place is not Place.INNER:
            node.place = place
        return node

    def touch(self, node: SegmentNode) -> None:
        """Record that the current request uses a node and its ancestors."""
        self.tree.touch(node)
        for member in node.lineage():
            member.used_at = self.now

    def refill(self, key: TokenKey, windows_from: int, refill: Refill) -> None:
        """Restore windows on a prefix that are worth more than the parts evicted for them.

        Args:
            windows_from: The first position whose windows `refill` has.
        """
        found = self.tree.match(key)
        for node in found.nodes:
            first = max(node.end - self.worth.thinning.reach_tokens, 0)
            # The last one may go on with other tokens, if there was no room for all of the prefix.
            # And making room for one may have joined another with the node below it.
            if windows_from <= first and node.end <= found.length and node.is_linked:
                self._refill(node, first, refill)

    def _refill(self, node: SegmentNode, first: int, refill: Refill) -> None:
        """Restore the windows of a node and its ancestors from a position on, if there is room."""
        if not self.worth.lacks_windows(node):
            return
        size = _refill_size(_refilled(node, first, refill))
        if not self.make_room(size, node, self.worth.of_refill(node, size)):
            return
        # Making room may have thinned nodes of the path.
        values = _refilled(node, first, refill)
        if (self.size + _refill_size(values)).fits(self.budget):
            self.fill(values)

    def used_tokens(self, key: TokenKey) -> int:
        """Return the tokens that would be in use with a prefix added, shared ones counted once."""
        found = self.tree.match(key)
        return path_tokens([*self.used.values(), *((node, found.length) for node in found.nodes)])

    def pin(self, key: TokenKey) -> None:
        """Evict a prefix after everything else; no effect unless all of it is stored.

        Nor if its end has to be cut from a node, and there is no room for the arrays of both.
        """
        found = self.tree.match(key)
        if found.last is None or found.length < len(key):
            return
        if not self.make_room(_cut_size(found), found.last, math.inf):
            return
        node = self._ending_at(self.tree.match(key))
        self.tree.pin(node)
        self.pinned[node] = None
        self.pinned.move_to_end(node)
        share = MAX_PINNED_SHARE
        most = Size(int(share * self.budget.nbytes), share * self.budget.arrays)
        while len(self.pinned) > 1 and not path_size(self.pinned).fits(most):
            oldest, _ = self.pinned.popitem(last=False)
            self.tree.unpin(oldest)

    def resize(self, budget_bytes: int) -> None:
        """Set the budget of bytes, and evict the excess.

        As a last resort, held paths are evicted too: nothing is copied from them any more, but
        their continuations cannot be stored. Paths in use stay.
        """
        self.budget = Size(budget_bytes, self.budget.arrays)
        self.shrink()
        if self.size.nbytes > budget_bytes:
            self.held.clear()
            self.shrink()

    def shrink(self) -> None:
        """Evict the excess, but no held path: nodes that were divided have more arrays."""
        if not self.size.fits(self.budget):
            self._evict_down_to(self.budget, set(self.held.values()))

    def make_room(self, needed: Size, path_end: SegmentNode | None, worth: float) -> bool:
        """Give up parts worth less until so much fits; if it cannot, change nothing."""
        if (self.size + needed).fits(self.budget):
            return True
        held = {*self.held.values(), *filter(None, (path_end,))}
        room = self.budget - needed
        return self.worth.least_size(held).fits(room) and self._evict_down_to(room, held, worth)

    def fill(self, values: dict[SegmentNode, Segment]) -> None:
        """Give nodes larger values of the same tokens; there must be room."""
        for node, value in values.items():
            self._replace(node, value)
            self._divided.append(value)
        self.version += 1

    def take_divided(self) -> list[Segment]:
        """Return the segments whose arrays were cut since the last call and need computing."""
        divided, self._divided = self._divided, []
        return divided

    def take_evicted(self) -> list[LooseNode]:
        """Return the parts of nodes evicted since the last call that are not on disk."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def unsaved_part(self, node: SegmentNode) -> LooseNode:
        """Return the part of an unsaved node that is not on disk."""
        start = self.unsaved.start(node)
        return LooseNode(node.key, start, node.value.after(start - node.start))

    def check(self) -> None:
        """Raise AssertionError unless bytes, tokens and names of nodes are right."""
        self.tree.check()
        nodes = list(self.tree.walk())
        if self.size != total_size(nodes):
            raise AssertionError("bytes or arrays are miscounted")
        if any(node.value.tokens != len(node.label) for node in nodes):
            raise AssertionError("a node holds other tokens than its own")
        used = [end for end, _ in self.used.values()]
        if not set(nodes).issuperset([*self.held.values(), *used, *self.pinned, *self.unsaved]):
            raise AssertionError("a node that is held, used, pinned or unsaved has been evicted")
        if any(not node.start <= self.unsaved.start(node) <= node.end for node in self.unsaved):
            raise AssertionError("a node lacks on disk what it does not hold")
        most_bytes = max(self.budget.nbytes, path_size(used).nbytes)
        most_arrays = max(self.budget.arrays, path_size([*used, *self.held.values()]).arrays)
        if not self.size.fits(Size(most_bytes, most_arrays)):
            raise AssertionError("more is stored than may be")

    def _add(self, key: TokenKey, found: Match[Segment], segment: Segment) -> SegmentNode:
        if found.last is not None:
            self._ending_at(found)
        node = self.tree.insert(key, found.length, segment)
        self.touch(node)
        # It may be cut from a longer one.
        self._divided.append(segment)
        self.size += segment.size
        self.version += 1
        return node

    def _attach(self, found: Match[Segment], snapshot: Snapshot | None) -> SegmentNode:
        """Attach a snapshot at the end of a match, unless there is one."""
        node = self._ending_at(found)
        if snapshot is not None and node.value.snapshot is None:
            self._replace(node, Segment(node.value.blocks, snapshot))
            self.version += 1
        self.touch(node)
        return node

    def _ending_at(self, found: Match[Segment]) -> SegmentNode:
        """Return a node that ends where a match does, splitting one if needed."""
        node = found.nodes[-1]
        if node.end == found.length:
            return node
        return self._split(node, found.length - node.start)

    def _evict_down_to(
        self, room: Size, held: set[SegmentNode], worth: float | None = None
    ) -> bool:
        """Give up leaves, snapshots and windows until the rest fits into `room`, if possible.

        Args:
            worth: Parts worth more stay too, and if they exceed the limit everything stays;
                `None` gives up any part, even if that is not enough.
        """
        taken = Taken()
        is_enough = False
        self._used_ends = {end for end, _ in self.used.values()}
        try:
            self._take(taken, room, held, math.inf if worth is None else worth)
            is_enough = self.size.fits(room)
        finally:
            self._put_back(taken, undone=worth is not None and not is_enough)
        for leaf in list(taken.leaves) if is_enough or worth is None else ():
            del taken.leaves[leaf]
            self._evict(leaf, held, taken.leaves)
        return is_enough

    def _take(self, taken: Taken, room: Size, held: set[SegmentNode], worth: float) -> None:
        """Set leaves aside and thin nodes, the least worth first.

        Of equal worth, the least recently used goes first. A worth may rise while other parts go,
        so it is computed again at its turn.
        """
        places, numbers = count(), count()
        queue = [
            (node.is_pinned and not node.children, value, next(places), next(numbers), node)
            for node in self.tree.by_recency()
            if (value := self._worth(node, held)) is not None
        ]
        heapify(queue)
        while queue and not self.size.fits(room):
            is_last, value, place, _, node = heappop(queue)
            now = None if node in taken.leaves else self._worth(node, held)
            if now is None:
                continue
            if now > value:
                heappush(queue, (is_last, now, place, next(numbers), node))
            elif value > worth:
                return
            elif self._stays(node):
                self._thin(node, taken, needs_bytes=self.size.nbytes > room.nbytes)
                if (left := self._worth(node, held)) is not None:
                    heappush(queue, (is_last, left, place, next(numbers), node))
            elif (parent := self._set_aside(node, taken)) is not None:
                value = self._worth(parent, held) or 0.0
                heappush(queue, (parent.is_pinned, value, place, next(numbers), parent))

    def _worth(self, node: SegmentNode, held: set[SegmentNode]) -> float | None:
        """Return the worth of a leaf or of an inner node's spare parts; `None` if it stays."""
        if node in held:
            return None
        return self.worth.of_spare(node) if self._stays(node) else self.worth.of_leaf(node)

    def _stays(self, node: SegmentNode) -> bool:
        """Tell whether a node can give up only its spare parts."""
        return bool(node.children) or node in self._used_ends

    def _thin(self, node: SegmentNode, taken: Taken, *, needs_bytes: bool) -> None:
        """Give up a node's windows except the last; if only that is left, its spare parts.

        Args:
            needs_bytes: Whether bytes are short; if arrays are, no node is divided for its windows.
        """
        if needs_bytes and (inside := self.worth.tokens_inside(node)):
            node = self._split(node, inside)
        taken.values.append((node, node.value))
        self._replace(node, self.worth.thinning.thin(node.value))

    def _set_aside(self, leaf: SegmentNode, taken: Taken) -> SegmentNode | None:
        """Set a leaf aside, and return its parent if that is now a leaf."""
        self.tree.set_aside(leaf)
        taken.leaves[leaf] = None
        self.size -= leaf.value.size
        parent = leaf.parent
        if parent is None or parent.children:
            return None
        if parent.used_at == leaf.used_at:
            taken.expected.append((parent, parent.is_expected))
            parent.is_expected |= leaf.is_expected
        return parent

    def _put_back(self, taken: Taken, *, undone: bool) -> None:
        """Put leaves back, to be evicted in order; if `undone`, restore all other parts too."""
        for leaf in taken.leaves:
            self.tree.put_back(leaf)
            self.size += leaf.value.size
        if not undone:
            return
        for node, value in reversed(taken.values):
            self._replace(node, value)
        for node, is_expected in reversed(taken.expected):
            node.is_expected = is_expected

    def _replace(self, node: SegmentNode, value: Segment) -> None:
        """Give a node of the tree another value."""
        self.size += value.size - node.value.size
        self.tree.replace(node, value)
        self.worth.forget(node)

    def _empty(self, gone: SegmentNode) -> None:
        """Drop the value of a node that has left the tree: a reference must not keep its arrays."""
        self.tree.replace(gone, Segment(()))
        self.worth.forget(gone)

    def _split(self, node: SegmentNode, at: int) -> SegmentNode:
        """Split off the first `at` tokens of a node as a new node, and return it."""
        self.size += Size(0, node.value.cut_arrays(at))
        upper = self.tree.split_at(node, at)
        self.worth.forget(node)
        self._divided += [upper.value, node.value]
        self.unsaved.divide(upper, node)
        return upper

    def _evict(
        self, leaf: SegmentNode, held: set[SegmentNode], others: Container[SegmentNode]
    ) -> None:
        """Remove a leaf; its parent is not joined with one of `others`, which go too."""
        if leaf in self.unsaved:
            self._evicted.append(self.unsaved_part(leaf))
        parent, kept = leaf.parent, {*held, *self._used_ends}
        if parent is not None and len(parent.children) == _JOINED_AT:
            [other] = (node for node in parent.children.values() if node is not leaf)
            is_joined = other not in others and self.unsaved.may_join(parent, other)
            kept.update(() if is_joined else [parent])
        self.size -= self.tree.remove(leaf, skip=kept).size
        self._empty(leaf)
        self.pinned.pop(leaf, None)
        self.unsaved.discard(leaf)
        self.evictions += 1
        if parent is not None and not parent.is_linked:
            # It has become a part of its only child.
            self.unsaved.join(parent, self.tree.match(parent.key).nodes[-1])
            self._empty(parent)


def _refilled(node: SegmentNode, first: int, refill: Refill) -> dict[SegmentNode, Segment]:
    path = (above for above in node.lineage() if above.end > first)
    return {above: above.value.refilled(above.start, first, refill) for above in path}


def _refill_size(values: Mapping[SegmentNode, Segment]) -> Size:
    return sum((value.size - node.value.size for node, value in values.items()), Size())


def _cut_size(found: Match[Segment]) -> Size:
    """Return the additional size of a node that has to be divided where a match ends."""
    last = found.last
    return Size(0, last.value.cut_arrays(found.length - last.start)) if last else Size()
