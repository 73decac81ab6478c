"""The likelihood of requests, learned from past ones."""

from collections import Counter, deque
from statistics import median
from typing import Protocol, TypeAlias

from backend.cache.kv import Segment
from backend.cache.radix import Match, Node
from backend.cache.token_key import TokenKey
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
    """Learns from past requests.

    Attributes:
        now: The number of past requests.
    """

    def __init__(self, *, has_snapshots: bool = False) -> None:
        """Start with priors for any model; `has_snapshots` is that of `Thinning`."""
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
        if node.is_expected and not node.is_turn and _is_left(node):
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


def _is_left(node: SegmentNode) -> bool:
    """Tell whether no request continues below a node."""
    return all(child.is_spent for child in node.children.values())
