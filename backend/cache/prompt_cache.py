"""The store of KV by token prefix: look up, insert, evict; safe from any thread.

The lock guards the tree and its books. Arrays are computed before it is taken or after it is
released, never in between.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from backend.cache.kv import Piece, Segment, Snapshot, evaluate
from backend.cache.radix import Match, Node, RadixTree
from backend.cache.token_key import TokenKey
from backend.core.status import HitKind, PromptCacheStatus

# A prefix of one token is the same BOS for everybody.
MIN_HIT_TOKENS = 2
MAX_KEPT_SHARE = 0.5

SegmentNode: TypeAlias = Node[Segment]
Usable: TypeAlias = Callable[[Sequence[Piece], int], int]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What the store knows of a prompt.

    Attributes:
        length: Tokens that can be restored: fewer than the prompt has, 0 on a miss.
        path: Their segments, from the first token on.
        matched: Tokens that are stored, whether they can be restored or not.
        beyond: What is stored behind them, where another prompt went on.
    """

    kind: HitKind
    length: int
    path: tuple[Piece, ...]
    matched: int
    beyond: TokenKey


class PromptCache:
    """KV of token prefixes, each prefix stored once.

    Attributes:
        version: Counts the insertions: an unchanged one gives the same hits.
    """

    def __init__(self, budget_bytes: int, usable: Usable) -> None:
        """Start empty.

        Args:
            budget_bytes: What all nodes together may hold.
            usable: How long a prefix can be restored from a path, up to a limit.
        """
        self._budget_bytes = budget_bytes
        self._usable = usable
        self._lock = threading.Lock()
        self._tree: RadixTree[Segment] = RadixTree()
        self._bytes = 0
        self._held: dict[str, SegmentNode] = {}
        self._kept: OrderedDict[SegmentNode, None] = OrderedDict()
        self._hits: Counter[HitKind] = Counter()
        self._looked_up_tokens = 0
        self._hit_tokens = 0
        self._evictions = 0
        self.version = 0

    def lookup(self, key: TokenKey, owner: str) -> PrefixHit:
        """Return the most of a prompt that can be restored; one token is always left.

        Args:
            key: The prompt.
            owner: Who looks: the path is not evicted until `release`.
        """
        with self._lock:
            found = self._tree.match(key)
            path = tuple(Piece(node.value, tokens) for node, tokens in found.spans())
            length = self._usable(path, len(key) - 1)
            beyond = _beyond(found)
            if length < MIN_HIT_TOKENS:
                return PrefixHit(HitKind.MISS, 0, (), found.length, beyond)
            last = next(node for node in found.nodes if node.end >= length)
            self._tree.touch(last)
            self._held[owner] = last
        return PrefixHit(_kind(found, key), length, _cut(path, length), found.length, beyond)

    def release(self, owner: str) -> None:
        """Let the path of `owner` be evicted again."""
        with self._lock:
            self._held.pop(owner, None)

    def stored(self, key: TokenKey) -> int:
        """Return how many of the first tokens of `key` are stored."""
        with self._lock:
            return self._tree.match(key).length

    def has_snapshot(self, key: TokenKey) -> bool:
        """Tell whether the state behind the last token of `key` is stored."""
        with self._lock:
            found = self._tree.match(key)
            last = found.last
            is_end = last is not None and last.end == found.length == len(key)
            return is_end and last is not None and last.value.snapshot is not None

    def insert(self, key: TokenKey, start: int, segment: Segment, owner: str) -> bool:
        """Store what the tree lacks of a prefix.

        Args:
            key: The whole prefix.
            start: Where `segment` begins; all before it should be stored.
            segment: KV of `key[start:]`, perhaps none, and the state behind it, computed.
            owner: Its path is not evicted until `release`.

        Returns:
            Whether the prefix is stored now: not if what was before it has been evicted, or if
            there is no room.
        """
        dropped: list[Segment] = []
        with self._lock:
            divided = self._insert(key, start, segment, dropped)
            if divided is None:
                return False
            self._held[owner] = self._tree.match(key).nodes[-1]
        evaluate(divided)
        return True

    def keep(self, key: TokenKey) -> None:
        """Evict this prefix, a system prompt, after everything else; no effect unless stored."""
        with self._lock:
            found = self._tree.match(key)
            if found.last is None or found.length < len(key):
                return
            node, divided = self._ending_at(found)
            self._tree.keep(node)
            self._kept[node] = None
            self._kept.move_to_end(node)
            self._bound_kept()
        evaluate(divided)

    def record(self, tokens: int, hit_tokens: int, kind: HitKind) -> None:
        """Count a prompt that was looked up, and how much of it was restored in the end."""
        with self._lock:
            self._looked_up_tokens += tokens
            self._hit_tokens += hit_tokens
            self._hits[kind] += 1

    def status(self) -> PromptCacheStatus:
        """Return a snapshot of the books."""
        with self._lock:
            return PromptCacheStatus(
                bytes=self._bytes,
                budget_bytes=self._budget_bytes,
                nodes=len(self._tree),
                tokens=self._tree.tokens,
                looked_up_tokens=self._looked_up_tokens,
                hit_tokens=self._hit_tokens,
                hits=dict(self._hits),
                evictions=self._evictions,
            )

    def check(self) -> None:
        """Raise AssertionError unless the books balance."""
        with self._lock:
            self._tree.check()
            nodes = list(self._tree.walk())
            if self._bytes != sum(node.value.nbytes for node in nodes):
                raise AssertionError("bytes are miscounted")
            if any(node.value.tokens != len(node.label) for node in nodes):
                raise AssertionError("a node holds other tokens than its own")
            if not set(nodes).issuperset([*self._held.values(), *self._kept]):
                raise AssertionError("a node that is held has been evicted")
            if self._bytes > self._budget_bytes:
                raise AssertionError("more is stored than may be")

    def _insert(
        self, key: TokenKey, start: int, segment: Segment, dropped: list[Segment]
    ) -> list[Segment] | None:
        """Insert, and return the values that were divided on the way; `None` if it cannot be."""
        found = self._tree.match(key)
        if found.length < start:
            return None
        if found.length > start:
            segment = _rest(segment, found.length - start)
        if not self._make_room(segment.nbytes, found.last, dropped):
            return None
        found = self._tree.match(key)
        if found.length == len(key):
            return self._attach(found, segment.snapshot)
        inside = found.last if found.last and found.length < found.last.end else None
        node = self._tree.insert(key, found.length, segment)
        self._bytes += segment.nbytes
        self.version += 1
        divided = [segment]
        if inside is not None and node.parent is not None:
            divided += [inside.value, node.parent.value]
        return divided

    def _attach(self, found: Match[Segment], snapshot: Snapshot | None) -> list[Segment]:
        """Put a snapshot where a match ends, unless one is there."""
        node, divided = self._ending_at(found)
        if snapshot is not None and node.value.snapshot is None:
            self._tree.replace(node, Segment(node.value.blocks, snapshot))
            self._bytes += snapshot.nbytes
            self.version += 1
        self._tree.touch(node)
        return divided

    def _ending_at(self, found: Match[Segment]) -> tuple[SegmentNode, list[Segment]]:
        """Return the node that ends where a match does, and the values divided for it."""
        node = found.nodes[-1]
        if node.end == found.length:
            return node, []
        upper = self._tree.split_at(node, found.length - node.start)
        return upper, [upper.value, node.value]

    def _make_room(self, needed: int, path_end: SegmentNode | None, dropped: list[Segment]) -> bool:
        """Evict the least recent leaves until so many bytes fit beside the others."""
        held = {*self._held.values(), *filter(None, (path_end,))}
        while self._bytes + needed > self._budget_bytes:
            leaf = self._tree.least_recent(skip=held)
            if leaf is None:
                return False
            dropped.append(self._tree.remove(leaf, skip=held))
            self._kept.pop(leaf, None)
            self._bytes -= dropped[-1].nbytes
            self._evictions += 1
        return True

    def _bound_kept(self) -> None:
        """Let system prompts crowd out no more than a share of the rest."""
        while len(self._kept) > 1 and self._kept_bytes() > MAX_KEPT_SHARE * self._budget_bytes:
            node, _ = self._kept.popitem(last=False)
            self._tree.unkeep(node)

    def _kept_bytes(self) -> int:
        nodes = {node for kept in self._kept for node in kept.lineage()}
        return sum(node.value.nbytes for node in nodes)


def _kind(found: Match[Segment], key: TokenKey) -> HitKind:
    last = found.nodes[-1]
    # The last token of a prompt is fed by the first decode step: its entry ends before.
    entry_ends = {len(key) - 1, len(key)}.intersection(node.end for node in found.nodes)
    if found.length in (len(key) - 1, len(key)) and entry_ends:
        return HitKind.EXACT
    if found.length == len(key):
        return HitKind.LONGER
    ends_there = found.length == last.end and not last.children
    return HitKind.SHORTER if ends_there else HitKind.DIVERGING


def _beyond(found: Match[Segment]) -> TokenKey:
    """Return the tokens stored behind a match, up to the end of a node."""
    last = found.last
    if last is None:
        return TokenKey(b"")
    if found.length < last.end:
        return last.label[found.length - last.start :]
    return next((child.label for child in last.children.values()), TokenKey(b""))


def _cut(path: Sequence[Piece], length: int) -> tuple[Piece, ...]:
    """Return the pieces of the first `length` tokens."""
    pieces = []
    for piece in path:
        if length > 0:
            pieces.append(Piece(piece.segment, min(piece.tokens, length)))
        length -= piece.tokens
    return tuple(pieces)


def _rest(segment: Segment, known: int) -> Segment:
    """Return a segment without its first tokens."""
    if known >= segment.tokens:
        return Segment((), segment.snapshot)
    return segment.split(known)[1]
