"""A path-compressed radix tree over token keys, with the order in which its nodes were used.

It owns only shape and order: it knows no bytes, no budget and no MLX.
"""

from array import array
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Generic, Protocol, Self, TypeVar, cast, overload

from backend.core.prompt import Place

BYTES_PER_TOKEN = 8
MIN_LOST_TOKENS = 64
_RUN_TOKENS = 16
_SKIPS = (1, 2, 4, 8, 16, 32)
_REACH_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TokenKey:
    """An immutable run of token ids; negative ones stand for media, such as images.

    Attributes:
        packed: The ids as signed 64-bit integers in the machine's byte order.
    """

    packed: bytes

    def __post_init__(self) -> None:
        if len(self.packed) % BYTES_PER_TOKEN:
            raise ValueError(f"{len(self.packed)} bytes are no whole number of tokens")

    @classmethod
    def from_ids(cls, ids: Sequence[int]) -> Self:
        """Pack `ids`; raise ValueError if one needs more than 64 bits."""
        try:
            return cls(array("q", ids).tobytes())
        except OverflowError as error:
            raise ValueError("a token id does not fit in 64 signed bits") from error

    @classmethod
    def concat(cls, parts: Iterable["TokenKey"]) -> Self:
        """Return the concatenation of `parts`."""
        return cls(b"".join(part.packed for part in parts))

    def __len__(self) -> int:
        return len(self.packed) // BYTES_PER_TOKEN

    def __repr__(self) -> str:
        return f"<TokenKey of {len(self)} tokens>"

    def __iter__(self) -> Iterator[int]:
        return iter(memoryview(self.packed).cast("q"))

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> "TokenKey": ...

    def __getitem__(self, index: int | slice) -> "int | TokenKey":
        tokens = memoryview(self.packed).cast("q")
        return TokenKey(tokens[index].tobytes()) if isinstance(index, slice) else tokens[index]

    def common_prefix(self, other: "TokenKey", start: int = 0) -> int:
        """Return the number of first tokens of `other` that match this key from `start` on.

        Bisects the position of the first difference. Every probe is one `memcmp` without a copy,
        and stops at that difference, so the tokens after it cost nothing.
        """
        theirs = memoryview(other.packed).cast("q")
        agreed, limit = 0, min(len(other), len(self) - start)
        probe = limit
        while agreed < limit:
            offset = (start + agreed) * BYTES_PER_TOKEN
            if self.packed.startswith(theirs[agreed:probe], offset):
                agreed = probe
            else:
                limit = probe - 1
            probe = (agreed + limit + 1) // 2
        return agreed


def agrees_again(key: TokenKey, matched: int, beyond: TokenKey) -> bool:
    """Tell whether a prompt goes on like a stored one soon after the place where they differ.

    Then something made them differ early although they are the same: a date, an id, a counter.
    """
    if len(key) - matched < MIN_LOST_TOKENS:
        return False
    stored = beyond[:_REACH_TOKENS].packed
    runs = (key[matched + skip : matched + skip + _RUN_TOKENS] for skip in _SKIPS)
    return any(len(run) == _RUN_TOKENS and _holds(stored, run.packed) for run in runs)


def _holds(stored: bytes, run: bytes) -> bool:
    place = stored.find(run)
    while place >= 0 and place % BYTES_PER_TOKEN:
        place = stored.find(run, place + 1)
    return place >= 0


class Link:
    """Base class of an item of one `RecencyList`; in none at first."""

    __slots__ = ("newer", "older")

    def __init__(self) -> None:
        self.older: Link | None = None
        self.newer: Link | None = None

    @property
    def is_linked(self) -> bool:
        """Whether this is in a list."""
        return self.newer is not None

    def place_after(self, older: "Link") -> None:
        """Move right after `older`, as the more recent of the two."""
        self._place(older, older.newer)

    def place_before(self, newer: "Link") -> None:
        """Move right before `newer`, as the less recent of the two."""
        self._place(newer.older, newer)

    def unlink(self) -> None:
        """Leave the list, if this is in one."""
        if self.older is not None and self.newer is not None:
            self.older.newer, self.newer.older = self.newer, self.older
        self.older = self.newer = None

    def _place(self, older: "Link | None", newer: "Link | None") -> None:
        if older is None or newer is None:
            raise ValueError("the neighbour stands in no list")
        self.older, self.newer = older, newer
        older.newer = newer.older = self


LinkT = TypeVar("LinkT", bound=Link)


class RecencyList(Generic[LinkT]):
    """Items from the least to the most recent; must not change while it is iterated."""

    def __init__(self) -> None:
        self._ends = Link()
        self._ends.older = self._ends.newer = self._ends

    def __iter__(self) -> Iterator[LinkT]:
        link = self._ends.newer
        while link is not None and link is not self._ends:
            yield cast("LinkT", link)
            link = link.newer

    def append(self, item: LinkT) -> None:
        """Make `item` the most recent, wherever it was before."""
        item.unlink()
        item.place_before(self._ends)


class Divisible(Protocol):
    """An immutable value that describes a run of tokens."""

    def split(self, at: int) -> tuple[Self, Self]:
        """Return the values of the first `at` tokens and of the others; both have some."""
        ...

    def joined(self, other: Self) -> Self | None:
        """Return the value of these tokens and then `other`'s; `None` if they must stay two."""
        ...


V = TypeVar("V", bound=Divisible)


class Node(Link, Generic[V]):
    """The tokens of one edge and their value; anyone may read it, only its tree changes it.

    A node is its deeper end: splits and joins move its start, never its end, so a reference stays
    valid until the node is removed or joined to the one below it.

    Attributes:
        label: The node's own tokens, at least one.
        value: Describes exactly the tokens of `label`.
        end: Tokens from the root to the node's end.
        parent: `None` at the root.
        children: By their first token.
        is_pin: Whether `RadixTree.pin` was called for this node itself.
        pins: The number of its own pin and its pinned children.
        used_at: The number of the last request that went through the node; set by its owner.
        hits: The number of requests that reused the whole node; counted by its owner.
        branches: The number of requests that branched off here from the tokens stored below.
        place: The part of a conversation that ends here.
        is_expected: Whether a request is certain to continue from here.
        is_once: Whether no request returns here.
        is_turn: Whether the next question of a conversation branches off here.
        is_spent: Whether no question continues from here, but from an `is_turn` above.
    """

    __slots__ = (
        *("branches", "children", "end", "hits", "is_expected", "is_once", "is_pin", "is_spent"),
        *("is_turn", "label", "parent", "pins", "place", "used_at", "value"),
    )

    def __init__(self, label: TokenKey, value: V, end: int, parent: "Node[V] | None") -> None:
        super().__init__()
        self.label = label
        self.value = value
        self.end = end
        self.parent = parent
        self.children: dict[int, Node[V]] = {}
        self.is_pin = False
        self.pins = 0
        self.used_at = 0
        self.hits = self.branches = 0
        self.is_expected = self.is_once = self.is_spent = self.is_turn = False
        self.place = Place.INNER

    @property
    def start(self) -> int:
        """Tokens from the root to the node's start."""
        return self.end - len(self.label)

    @property
    def is_pinned(self) -> bool:
        """Whether this node or one below it has a pin: all others are evicted before it."""
        return self.pins > 0

    @property
    def key(self) -> TokenKey:
        """The tokens from the root to the node's end."""
        return TokenKey.concat(reversed([node.label for node in self.lineage()]))

    def lineage(self) -> "Iterator[Node[V]]":
        """Yield this node, its parent, and so on up to the root."""
        node: Node[V] | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class Match(Generic[V]):
    """The longest prefix of a key that a tree holds; valid until the tree's shape changes.

    Attributes:
        nodes: From the root down; all but the last are covered completely.
    """

    length: int
    nodes: tuple[Node[V], ...]

    @property
    def last(self) -> Node[V] | None:
        """The node in which the match ends, perhaps inside its label; `None` if nothing did."""
        return self.nodes[-1] if self.nodes else None

    def spans(self) -> Iterator[tuple[Node[V], int]]:
        """Yield each node with the number of its tokens that the match covers, at least one."""
        for node in self.nodes:
            yield node, min(node.end, self.length) - node.start


class RadixTree(Generic[V]):
    """Values of token runs, found by prefix; shared prefixes are stored once.

    Nodes have an eviction order: pinned ones come after all others, and in both classes the least
    recently used comes first. A parent is always more recent than its children, and pinned if one
    of them is, so the first node is a leaf.

    A lookup makes one comparison for each node on its path. Only the iterators and `check` visit
    more than one path, and nothing recurses.

    Attributes:
        tokens: Stored ones, shared ones once.
    """

    def __init__(self) -> None:
        self._top: dict[int, Node[V]] = {}
        self._ordinary: RecencyList[Node[V]] = RecencyList()
        self._pinned: RecencyList[Node[V]] = RecencyList()
        self._size = 0
        self.tokens = 0

    def __len__(self) -> int:
        return self._size

    def match(self, key: TokenKey) -> Match[V]:
        """Find the longest prefix of `key`; changes neither shape nor order."""
        length, nodes, children = 0, list[Node[V]](), self._top
        while length < len(key) and (node := children.get(key[length])) is not None:
            length += key.common_prefix(node.label, length)
            nodes.append(node)
            if length < node.end:
                break
            children = node.children
        return Match(length, tuple(nodes))

    def insert(self, key: TokenKey, start: int, value: V) -> Node[V]:
        """Store `value` for `key[start:]` and return its node, the most recently used.

        Args:
            key: Must have tokens that the tree lacks.
            start: The number of tokens of `key` that the tree holds.

        Raises:
            ValueError: `start` is not the length of the match, or is the whole key.
        """
        found = self.match(key)
        if found.length != start or start == len(key):
            raise ValueError(f"the tree holds {found.length} of {len(key)} tokens, not {start}")
        parent = found.last
        if parent is not None and start < parent.end:
            parent = self.split_at(parent, start - parent.start)
        node = Node(key[start:], value, len(key), parent)
        self._siblings(node)[node.label[0]] = node
        self._make_newest(node)
        self._size += 1
        self.tokens += len(node.label)
        return node

    def split_at(self, node: Node[V], at: int) -> Node[V]:
        """Split off the first `at` tokens of `node` as a new node, and return it.

        `node` becomes the lower part. The upper one is as recent, and pinned if `node` is.

        Raises:
            ValueError: A part would be empty, or the node is no longer in the tree.
        """
        self._require(node)
        if not 0 < at < len(node.label):
            raise ValueError(f"a node of {len(node.label)} tokens cannot be split at {at}")
        above, below = node.value.split(at)
        upper = Node(node.label[:at], above, node.start + at, node.parent)
        upper.place_after(node)
        upper.pins = int(node.is_pinned)
        upper.used_at, upper.hits = node.used_at, node.hits
        upper.is_expected, upper.is_once = node.is_expected, node.is_once
        upper.is_spent = node.is_spent
        self._siblings(node)[upper.label[0]] = upper
        node.label, node.value, node.parent = node.label[at:], below, upper
        upper.children[node.label[0]] = node
        self._size += 1
        return upper

    def replace(self, node: Node[V], value: V) -> None:
        """Give `node` another value of the same tokens."""
        node.value = value

    def touch(self, node: Node[V]) -> None:
        """Make `node` and its ancestors the most recently used of their classes."""
        self._require(node)
        self._make_newest(node)

    def pin(self, node: Node[V]) -> None:
        """Mark `node`, so that it and its ancestors are evicted last; touches it."""
        self._require(node)
        if not node.is_pin:
            node.is_pin = True
            for member in node.lineage():
                member.pins += 1
                if member.pins > 1:
                    break
        self._make_newest(node)

    def unpin(self, node: Node[V]) -> None:
        """Undo `pin`; nodes without another pin become ordinary, and the most recent."""
        if not node.is_pin:
            return
        node.is_pin = False
        for member in node.lineage():
            member.pins -= 1
            if member.is_pinned:
                return
            self._ordinary.append(member)

    def by_recency(self) -> Iterator[Node[V]]:
        """Yield all nodes in eviction order; the tree must not change meanwhile."""
        return chain(self._ordinary, self._pinned)

    def set_aside(self, leaf: Node[V]) -> None:
        """Take a leaf out of its parent's children only, until `put_back`; no lookup meanwhile."""
        del self._siblings(leaf)[leaf.label[0]]

    def put_back(self, leaf: Node[V]) -> None:
        """Undo `set_aside`."""
        self._siblings(leaf)[leaf.label[0]] = leaf

    def remove(self, leaf: Node[V], skip: Container[Node[V]] = ()) -> V:
        """Remove a leaf and return its value.

        A parent left with one child is joined with it, if their values allow it. The child becomes
        both, as recent as the parent was. A parent that is itself pinned or in `skip` is held, and
        stays as it is.

        Raises:
            ValueError: The node has children, or is no longer in the tree.
        """
        self._require(leaf)
        if leaf.children:
            raise ValueError("only a leaf can be removed")
        self.unpin(leaf)
        del self._siblings(leaf)[leaf.label[0]]
        leaf.unlink()
        self._size -= 1
        self.tokens -= len(leaf.label)
        if leaf.parent is not None and leaf.parent not in skip:
            self._join(leaf.parent)
        return leaf.value

    def walk(self) -> Iterator[Node[V]]:
        """Yield every node, parents before children; the tree must not change meanwhile."""
        pending = list(self._top.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def check(self) -> None:
        """Raise AssertionError unless links, lengths, pins and order hold."""
        nodes = list(self.walk())
        for node in nodes:
            self._check_place(node)
            if node.pins != node.is_pin + sum(child.is_pinned for child in node.children.values()):
                raise AssertionError("the pins of a node are miscounted")
        self._check_order(set(nodes))
        if (self._size, self.tokens) != (len(nodes), sum(len(node.label) for node in nodes)):
            raise AssertionError("nodes or tokens are miscounted")

    def _require(self, node: Node[V]) -> None:
        if not node.is_linked:
            raise ValueError("the node is no longer in the tree")

    def _siblings(self, node: Node[V]) -> dict[int, Node[V]]:
        return self._top if node.parent is None else node.parent.children

    def _make_newest(self, node: Node[V]) -> None:
        for member in node.lineage():
            (self._pinned if member.is_pinned else self._ordinary).append(member)

    def _join(self, upper: Node[V]) -> None:
        """Replace `upper` by its only child, if it has just one and values allow it."""
        if upper.is_pin or len(upper.children) != 1:
            return
        (lower,) = upper.children.values()
        value = upper.value.joined(lower.value)
        if value is None:
            return
        self._siblings(upper)[upper.label[0]] = lower
        lower.label = TokenKey.concat((upper.label, lower.label))
        lower.value, lower.parent = value, upper.parent
        lower.is_once = lower.is_once and upper.is_once
        lower.unlink()
        lower.place_after(upper)
        upper.unlink()
        self._size -= 1

    def _check_place(self, node: Node[V]) -> None:
        if not node.label:
            raise AssertionError("a node without tokens")
        if self._siblings(node).get(node.label[0]) is not node:
            raise AssertionError("a node is not where its first token says")
        if node.start != (0 if node.parent is None else node.parent.end):
            raise AssertionError("a node does not start where its parent ends")

    def _check_order(self, nodes: set[Node[V]]) -> None:
        order = [*self._ordinary, *self._pinned]
        if len(order) != len(nodes) or set(order) != nodes:
            raise AssertionError("the tree and its order hold different nodes")
        if any(node.is_pinned for node in self._ordinary) or not all(
            n.is_pinned for n in self._pinned
        ):
            raise AssertionError("a node stands in the order of the other class")
        rank = {node: place for place, node in enumerate(order)}
        if any(node.parent is not None and rank[node] > rank[node.parent] for node in nodes):
            raise AssertionError("a node is more recent than its parent")
