"""The likelihood of requests, learned from past ones, and the worth of nodes that follows."""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol, TypeAlias

from backend.cache.kv import Segment, Size
from backend.cache.radix import Match, Node, RadixTree, TokenKey
from backend.core.prompt import Place

SegmentNode: TypeAlias = Node[Segment]

# Prior rate of requests that branch off at a place where a conversation has continued.
_PRIOR_BRANCHES = {
    Place.INNER: 0.005,
    Place.SYSTEM: 0.5,
    Place.MESSAGE: 0.1,
    Place.PROMPT: 0.05,
    Place.REPLY: 0.02,
}
_PRIOR_WEIGHT = 20.0
# A conversation that waits for a tool result is certain to continue; others have often ended.
_UNEXPECTED = 0.25
# It is due after the median wait of this many earlier ones, counted in requests.
_KNOWN_WAITS = 32
# Once overdue, it ages by one in this many requests.
_PATIENCE = 2.0
# It calls tools several times before the next question.
_TURN = 0.15
_EXPECTED_WITHIN = 4.0
# If later prompts leave out thoughts, no request continues from a finished reply.
_SPENT = 0.02


class Forecast(Protocol):
    """The likelihood of requests; the unit is the next request."""

    def resumption(self, leaf: SegmentNode) -> float:
        """Return the likelihood that a request continues from a leaf."""

    def branching(self, node: SegmentNode) -> float:
        """Return the likelihood that a request continues from a node's end, and not from below."""

    def newcomer(self, key: TokenKey, place: Place) -> float:
        """Return the likelihood that another request continues from a prefix just computed."""


class LearnedForecast:
    """Learns from past requests."""

    def __init__(self, *, has_snapshots: bool = False) -> None:
        self.now = 0
        self._has_snapshots = has_snapshots
        self._waits: deque[int] = deque(maxlen=_KNOWN_WAITS)
        self._due = 0.0
        self._passed: Counter[Place] = Counter()
        self._parted: Counter[Place] = Counter()

    def note_prompt(self, found: Match[Segment]) -> None:
        """Learn where a new prompt leaves the stored tokens, of which it matches some."""
        last = found.nodes[-1]
        if found.length < last.end - 1 or last.children:
            parted = last if found.length == last.end else last.parent
            if parted is not None:
                self.note_branch(parted)
            return
        for node in found.nodes:
            if node.used_at == last.used_at:
                self.note_resumption(node)
        if last.is_expected:
            self._waits.append(self.now - last.used_at)
            self._due = median(self._waits)
        last.is_expected = False

    def note_resumption(self, node: SegmentNode) -> None:
        """Record that a conversation has continued from a node for the first time."""
        self._passed[node.place] += 1

    def note_branch(self, node: SegmentNode) -> None:
        """Record that a request has branched off at a node."""
        self._parted[node.place] += 1
        node.branches += 1
        node.is_turn = node.is_expected = False
        self._note_left(node)

    def _note_left(self, parted: SegmentNode) -> None:
        """Record that no request returns to the conversation left here, if it is the only one."""
        end = parted
        while len(end.children) == 1:
            (end,) = end.children.values()
        if not (end.children or parted.is_pinned):
            end.is_spent, end.is_expected = True, False

    def resumption(self, leaf: SegmentNode) -> float:
        """Return the likelihood that a request continues from a leaf: highest when it is due."""
        age = self.now - leaf.used_at
        if leaf.is_once:
            return 0.0
        if leaf.is_expected:
            return self._due_likelihood(age)
        if leaf.is_turn:
            return self._turning(leaf)
        return (_SPENT if leaf.is_spent else _UNEXPECTED) / (1.0 + age)

    def branching(self, node: SegmentNode) -> float:
        """Return the likelihood of a branch at a node, or below where it falls back on the node."""
        likely, pending = 0.0, [node]
        while pending:
            place = pending.pop()
            likely += self._parting(place) if place.children else self.resumption(place)
            below = place.children.values() if self._has_snapshots else ()
            pending += [child for child in below if child.value.snapshot is None]
        return likely

    def _parting(self, node: SegmentNode) -> float:
        """Return the likelihood of a branch at a node, by the rate at others of its kind."""
        is_left = all(child.is_spent for child in node.children.values())
        if node.is_expected and not node.is_turn and is_left:
            return self._due_likelihood(self.now - node.used_at)
        parted = self._parted[node.place] + _PRIOR_BRANCHES[node.place] * _PRIOR_WEIGHT
        share = parted / (self._passed[node.place] + _PRIOR_WEIGHT)
        away = abs(self._due - (self.now - node.used_at))
        likely = share * (1 + node.branches) / (1.0 + away)
        return max(likely, self._turning(node)) if node.is_turn else likely

    def _due_likelihood(self, age: int) -> float:
        """Return the likelihood of a certain request, by the requests since the last one."""
        return 1.0 / (1.0 + max(self._due - age, (age - self._due) / _PATIENCE))

    def _turning(self, node: SegmentNode) -> float:
        """Return the likelihood that the next question of a conversation branches off at a node."""
        age = self.now - node.used_at
        if node.is_expected:
            return _TURN / (1.0 + age / _EXPECTED_WITHIN)
        return _UNEXPECTED / (1.0 + age)

    def newcomer(self, key: TokenKey, place: Place) -> float:  # noqa: ARG002 (the protocol's)
        """Return the likelihood of a conversation that continues when it is due."""
        if place is Place.SYSTEM or not self._waits:
            return 1.0
        # The wait begins with the end of the running request.
        return 1.0 / (1.0 + self._due + (place is not Place.REPLY))


@dataclass(frozen=True, slots=True)
class Thinning:
    """Removes the parts of a segment that only a request branching off near it needs.

    Attributes:
        thin: Returns the segment without its snapshot and its sliding windows.
        reach_tokens: Size of the largest window; 0 without windows.
        has_snapshots: Whether a prefix can be restored only at a snapshot.
    """

    thin: Callable[[Segment], Segment]
    reach_tokens: int
    has_snapshots: bool


NO_THINNING = Thinning(lambda segment: segment, reach_tokens=0, has_snapshots=False)


@dataclass(slots=True)
class Taken:
    """Parts taken to make room, which can be put back.

    Attributes:
        expected: Nodes that became leaves, with their previous `is_expected`.
    """

    leaves: dict[SegmentNode, None] = field(default_factory=dict)
    values: list[tuple[SegmentNode, Segment]] = field(default_factory=list)
    expected: list[tuple[SegmentNode, bool]] = field(default_factory=list)


@dataclass(frozen=True, eq=False, slots=True)
class Worth:
    """The worth of nodes and of their parts, in expected tokens per byte.

    Attributes:
        bytes_per_array: The bytes that are as scarce as one array.
    """

    forecast: Forecast
    thinning: Thinning
    bytes_per_array: float = 0.0
    _spare: dict[SegmentNode, tuple[Segment, Size]] = field(default_factory=dict)

    def of_leaf(self, leaf: SegmentNode) -> float:
        """Return the worth of a leaf as a whole."""
        gain = self.restorable(leaf) - self.restorable(leaf.parent)
        return self.forecast.resumption(leaf) * self._per_byte(gain, self._size_for(leaf))

    def _size_for(self, leaf: SegmentNode) -> Size:
        """Return the size of a leaf, and of its ancestors that no request needs without it."""
        size, node = leaf.value.size, leaf.parent
        while node is not None and len(node.children) == 1 and not self._is_whole(node):
            size += node.value.size
            node = node.parent
        return size

    def _per_byte(self, tokens: int, size: Size) -> float:
        """Return tokens per byte: divided first, so equal for nodes of one kind and any length."""
        return tokens / max(size.nbytes, size.arrays * self.bytes_per_array, 1)

    def of_newcomer(self, key: TokenKey, found: Match[Segment], likely: float, size: Size) -> float:
        """Return the worth of a segment before it is stored."""
        gain = len(key) - self._restorable_of(found)
        return likely * self._per_byte(gain, size)

    def _restorable_of(self, found: Match[Segment]) -> int:
        """Return the number of restorable tokens of a match, which may end inside a node."""
        last = found.last
        if last is None or found.length == last.end:
            return self.restorable(last)
        if self.thinning.has_snapshots:
            return self.restorable(last.parent)
        return min(self.restorable(last), found.length)

    def of_refill(self, node: SegmentNode, size: Size) -> float:
        """Return the worth of the parts that a node lacks to be restorable."""
        return self._demand(node) * self._per_byte(node.end - self.restorable(node), size)

    def lacks_windows(self, node: SegmentNode) -> bool:
        """Tell whether only windows are missing to restore the prefix that ends at a node."""
        return self._has_state(node) and not self._is_whole(node)

    def of_spare(self, node: SegmentNode) -> float | None:
        """Return the worth of the parts that an inner node gives up next; `None` if it has none."""
        spare = self._spare_of(node)
        if not spare.nbytes:
            return None
        if self.tokens_inside(node):
            # A request that branches off inside recomputes half of these tokens on average, which
            # take their share of the bytes.
            return self._demand(node) * self._per_byte(len(node.label), spare) / 2
        base = self.restorable(node.parent)
        dependents = self._dependents(node)
        return sum(
            self._demand(each) * self._per_byte(each.end - base, spare) for each in dependents
        )

    def tokens_inside(self, node: SegmentNode) -> int:
        """Return the number of tokens with windows that only a cut inside the node needs."""
        if self.thinning.has_snapshots or not node.value.blocks[0].has_windows:
            return 0
        return max(len(node.label) - self.thinning.reach_tokens, 0)

    def _spare_of(self, node: SegmentNode) -> Size:
        """Return the size of the parts that a node can give up."""
        known = self._spare.get(node)
        if known is None or known[0] is not node.value:
            spare = node.value.size - self.thinning.thin(node.value).size
            known = self._spare[node] = (node.value, spare)
        return known[1]

    def least_size(self, ends: set[SegmentNode]) -> Size:
        """Return the size of paths after they give up all that they can."""
        nodes = path_nodes(ends)
        spare = sum((self._spare_of(node) for node in nodes - ends), Size())
        return total_size(nodes) - spare

    def of_subtrees(self, tree: RadixTree[Segment]) -> dict[SegmentNode, float]:
        """Return the worth of each node, which stays as long as any node below it."""
        worths: dict[SegmentNode, float] = {}
        for node in reversed(list(tree.walk())):
            below = [worths[child] for child in node.children.values()]
            worths[node] = max(below) if below else self.of_leaf(node)
        return worths

    def forget(self, node: SegmentNode) -> None:
        """Forget a node that is removed or gets another value, and with it the old arrays."""
        self._spare.pop(node, None)

    def restorable(self, node: SegmentNode | None) -> int:
        """Return the number of restorable tokens of the prefix that ends at a node."""
        while node is not None and not self._is_whole(node):
            node = node.parent
        return 0 if node is None else node.end

    def _demand(self, node: SegmentNode) -> float:
        if node.is_pin:
            return 1.0
        forecast = self.forecast
        return forecast.branching(node) if node.children else forecast.resumption(node)

    def _dependents(self, node: SegmentNode) -> list[SegmentNode]:
        """Return the nodes whose ends can no longer be restored without a node's spare parts."""
        found, pending = [], [node]
        reach = self.thinning.reach_tokens
        while pending:
            below = pending.pop()
            if below is node or below.end - node.end < reach:
                if self._is_whole(below):
                    found.append(below)
                if reach:
                    pending.extend(below.children.values())
        return found

    def _is_whole(self, node: SegmentNode) -> bool:
        """Tell whether the prefix that ends at a node can be restored."""
        reach = min(self.thinning.reach_tokens, node.end)
        return self._has_state(node) and _windows_reach(node, reach)

    def _has_state(self, node: SegmentNode) -> bool:
        """Tell whether the state at a node's end is there, or none is needed."""
        return not self.thinning.has_snapshots or node.value.snapshot is not None


def path_nodes(ends: Iterable[SegmentNode]) -> set[SegmentNode]:
    """Return nodes and their ancestors."""
    return {node for end in ends for node in end.lineage()}


def total_size(nodes: Iterable[SegmentNode]) -> Size:
    """Return the size of nodes."""
    return sum((node.value.size for node in nodes), Size())


def path_size(ends: Iterable[SegmentNode]) -> Size:
    """Return the size of nodes and their ancestors, shared ones once."""
    return total_size(path_nodes(ends))


def path_tokens(ends: Iterable[tuple[SegmentNode, int]]) -> int:
    """Return the number of tokens on paths up to a position in each last node, shared ones once."""
    counted: dict[SegmentNode, int] = {}
    for end, stop in ends:
        for node in end.lineage():
            counted[node] = max(counted.get(node, 0), min(stop, node.end) - node.start)
    return sum(counted.values())


def _windows_reach(node: SegmentNode, tokens: int) -> bool:
    """Tell whether the last `tokens` tokens before a node's end have their windows."""
    for above in node.lineage():
        for block in reversed(above.value.blocks):
            if tokens <= 0 or not block.has_windows:
                return tokens <= 0
            tokens -= block.tokens
    return tokens <= 0
