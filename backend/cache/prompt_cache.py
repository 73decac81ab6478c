"""The prompt cache: KV by token prefix, evicted by the tokens it is expected to save per byte.

It belongs to the thread that created it and has no lock: other threads use it through the engine's
queue of commands. A call from another thread raises.
"""

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TypeAlias

from backend.cache.eviction import (
    NO_THINNING,
    Forecast,
    LearnedForecast,
    SegmentNode,
    Thinning,
    path_nodes,
)
from backend.cache.kv import LooseNode, Piece, Refill, Segment, Size, evaluate
from backend.cache.node_store import NodeStore
from backend.cache.radix import BYTES_PER_TOKEN, Match, TokenKey
from backend.core.metric_table import Counts, Values
from backend.core.prefix_listing import (
    HitKind,
    ListingRequest,
    PromptCacheListing,
    RecomputedPrefix,
    ReuseSpan,
    StoredPrefix,
)
from backend.core.prompt import Place

MAX_KNOWN = 256
# The most tokens that are told of a prefix.
HEAD_TOKENS = 32
_TOLD = 10
_DIGEST_BYTES = 16
SPAN_S = 300.0
MAX_SPANS = 60
_MIB = 2**20

Worths: TypeAlias = dict[SegmentNode, float]


class Books:
    """Counts lookups, evictions and tokens computed again; belongs to the thread of its cache."""

    def __init__(self) -> None:
        self._counts = Counts()
        self._reuse = ReuseHistory()
        self._evicted = EvictedPrefixes()
        self._asked: dict[str, int] = {}

    def note_prompt(self, owner: str, key: TokenKey, found: Match[Segment], length: int) -> None:
        """Count, once for each owner, the tokens that it computes though they were stored.

        Args:
            owner: Who looks a prompt up; known until `forget`.
        """
        if owner in self._asked:
            return
        self._asked[owner] = length
        self._evicted.note_prompt(key, found.length)
        lost = max(min(found.length, len(key) - 1) - length, 0)
        self._counts.add("prompt_cache.stateless_tokens", lost)

    def forget(self, owner: str, end: SegmentNode | None) -> None:
        """Count the nodes that an owner has reused, now that they were divided where it left them.

        Args:
            owner: Its next prompt is counted anew.
            end: Where its path ends, if it holds one.
        """
        length = self._asked.pop(owner, 0)
        for node in end.lineage() if end is not None else ():
            node.hits += node.end <= length

    def note_evicted(self, nodes: Iterable[LooseNode]) -> None:
        """Note nodes that only this cache held."""
        for node in (node for node in nodes if node.start < len(node.key)):
            self._evicted.note_evicted(node.key, node.start)

    def record(self, tokens: int, hit_tokens: int, kind: HitKind) -> None:
        """Count a prompt, and how much of it was restored in the end."""
        self._counts.add("prompt_cache.looked_up_tokens", tokens)
        self._counts.add("prompt_cache.hit_tokens", hit_tokens)
        self._counts.add(f"prompt_cache.hits.{kind.value}")
        self._reuse.record(tokens, hit_tokens)

    def metrics(self, nodes: NodeStore) -> Values:
        """Return the counts, and the numbers of the nodes."""
        return self._counts.values | {
            "prompt_cache.bytes": nodes.size.nbytes,
            "prompt_cache.budget_bytes": nodes.budget.nbytes,
            "prompt_cache.arrays": nodes.size.arrays,
            "prompt_cache.nodes": len(nodes.tree),
            "prompt_cache.tokens": nodes.tree.tokens,
            "prompt_cache.evictions": nodes.evictions,
            "prompt_cache.recomputed_tokens": self._evicted.recomputed_tokens,
        }

    def listing(
        self, nodes: NodeStore, request: ListingRequest, *, has_disk: bool
    ) -> PromptCacheListing:
        """Return the nodes as `list_prefixes` does, and the prefixes computed again."""
        return PromptCacheListing(
            prefixes=list_prefixes(nodes, request, has_disk=has_disk),
            spans=self._reuse.spans(),
            recomputed=self._evicted.worst(request.head_tokens),
            recomputed_tokens=self._evicted.recomputed_tokens,
            stateless_tokens=int(self._counts.values["prompt_cache.stateless_tokens"]),
        )


@dataclass(slots=True)
class _Evicted:
    start: int
    end: int
    head: tuple[int, ...]
    is_gone: bool = True
    times: int = 0
    tokens: int = 0


class EvictedPrefixes:
    """Knows the last evicted prefixes by digest, and counts those that are wanted again."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, _Evicted] = OrderedDict()
        self.recomputed_tokens = 0

    def note_evicted(self, key: TokenKey, start: int) -> None:
        """Note that the tokens of `key` from `start` on are no longer stored."""
        digest = blake2b(key.packed, digest_size=_DIGEST_BYTES).digest()
        known = self._known.pop(digest, None)
        if known is None:
            known = _Evicted(start, len(key), tuple(key[start : start + HEAD_TOKENS]))
        known.start, known.is_gone = start, True
        self._known[digest] = known
        if len(self._known) > MAX_KNOWN:
            # The oldest, one that nobody has wanted again if there is one.
            unwanted = (digest for digest, each in self._known.items() if not each.times)
            del self._known[next(unwanted, next(iter(self._known)))]

    def note_prompt(self, key: TokenKey, stored: int) -> None:
        """Count a prompt's tokens of evicted prefixes; its first `stored` tokens are there."""
        gone = [each for each in self._known.items() if each[1].is_gone and each[1].end <= len(key)]
        hasher, hashed = blake2b(digest_size=_DIGEST_BYTES), 0
        for digest, prefix in sorted(gone, key=lambda each: each[1].end):
            hasher.update(key.packed[hashed * BYTES_PER_TOKEN : prefix.end * BYTES_PER_TOKEN])
            hashed = prefix.end
            if hasher.digest() != digest:
                continue
            prefix.is_gone = False
            if prefix.end > stored:
                tokens = prefix.end - max(prefix.start, stored)
                prefix.times += 1
                prefix.tokens += tokens
                self.recomputed_tokens += tokens

    def worst(self, head_tokens: int) -> tuple[RecomputedPrefix, ...]:
        """Return those that cost most, the worst first, with so many tokens of each."""
        again = (each for each in self._known.values() if each.times)
        ranked = sorted(again, key=lambda each: each.tokens, reverse=True)
        return tuple(
            RecomputedPrefix(
                start=each.start,
                tokens=each.end - each.start,
                times=each.times,
                recomputed_tokens=each.tokens,
                head=each.head[:head_tokens],
            )
            for each in ranked[:_TOLD]
        )


class ReuseHistory:
    """Counts lookups by spans of five minutes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By the number of spans before it.
        self._spans: deque[tuple[int, ReuseSpan]] = deque(maxlen=MAX_SPANS)

    def record(self, tokens: int, hit_tokens: int) -> None:
        """Count the tokens of a prompt, and those that were restored."""
        number = int(self._clock() // SPAN_S)
        known = self._spans and self._spans[-1][0] == number
        _, span = self._spans.pop() if known else (number, ReuseSpan())
        counts = (span.requests + 1, span.looked_up_tokens + tokens, span.hit_tokens + hit_tokens)
        self._spans.append((number, ReuseSpan(0.0, *counts)))

    def spans(self) -> tuple[ReuseSpan, ...]:
        """Return those of the last five hours, the oldest first."""
        now = self._clock()
        oldest = now // SPAN_S - MAX_SPANS
        return tuple(
            replace(span, age_s=now - number * SPAN_S)
            for number, span in self._spans
            if number > oldest
        )


def list_prefixes(
    nodes: NodeStore, request: ListingRequest, *, has_disk: bool
) -> tuple[StoredPrefix, ...]:
    """Return the nodes that would go last, with all that they go on from.

    Args:
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
            start=node.start,
            tokens=len(node.label),
            bytes=node.value.size.nbytes,
            place=Place.SYSTEM if node.is_pin else node.place,
            hits=node.hits,
            is_pinned=node.is_pinned,
            has_state=node.value.snapshot is not None,
        )
        for node, number in numbers.items()
    )


def _numbers(nodes: NodeStore, worths: Worths, most: int) -> dict[SegmentNode, int]:
    """Return the nodes that would go last, numbered from 1 on, parents before their children."""

    def rank(node: SegmentNode) -> tuple[bool, float, int]:
        return node.is_pinned, worths[node], node.used_at

    # No parent is less pinned, worth or recent than its children, and it comes first among equals.
    order = list(nodes.tree.walk())
    kept = set(sorted(order, key=rank, reverse=True)[:most])
    return {node: number for number, node in enumerate(filter(kept.__contains__, order), 1)}


# A prefix of one token is only the BOS that all prompts share.
MIN_HIT_TOKENS = 2
# The ends of this many latest requests are remembered.
MAX_RELEASED = 256

Usable: TypeAlias = Callable[[Sequence[Piece], int], int]
OnEvict: TypeAlias = Callable[[Sequence[LooseNode]], None]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The stored part of a prompt.

    Attributes:
        length: Restorable tokens: fewer than the prompt has, 0 on a miss.
        path: Their segments, from the first token on.
        matched: Stored tokens, restorable or not.
        beyond: Tokens stored after them, from another prompt.
        parts_in_reply: Whether those are of a generated reply, from which a template may have
            taken a thought since.
    """

    kind: HitKind
    length: int
    path: tuple[Piece, ...]
    matched: int
    beyond: TokenKey
    parts_in_reply: bool = False


class PromptCache:
    """KV of token prefixes, each prefix stored once; belongs to one thread."""

    def __init__(
        self,
        budget_bytes: int,
        usable: Usable,
        *,
        thinning: Thinning = NO_THINNING,
        on_evict: OnEvict | None = None,
        forecast: Forecast | None = None,
        max_arrays: float = math.inf,
    ) -> None:
        """Create an empty cache.

        Args:
            usable: Returns the length of the prefix that a path can restore, up to a limit.
            thinning: Of nodes, before they are evicted.
            on_evict: Receives the evicted nodes that are not on disk.
            forecast: The likelihood of requests; `None` learns it from past ones.
        """
        self._usable = usable
        self._on_evict = on_evict
        self._thread = threading.get_ident()
        self._learned = LearnedForecast(has_snapshots=thinning.has_snapshots)
        self._once: set[str] = set()
        self._prompts: dict[str, TokenKey] = {}
        # Read in every turn; splits and joins of nodes do not change it.
        self._used_tokens: int | None = None
        self._released: OrderedDict[str, tuple[SegmentNode, int]] = OrderedDict()
        budget = Size(budget_bytes, max_arrays)
        self._nodes = NodeStore(budget, forecast or self._learned, thinning)
        self._books = Books()

    @property
    def nodes(self) -> NodeStore:
        """The nodes, on the cache's own thread only."""
        if threading.get_ident() != self._thread:
            raise RuntimeError("the prompt cache is used by a thread that it does not belong to")
        return self._nodes

    @property
    def version(self) -> int:
        """Counts insertions; while it is unchanged, so are hits."""
        return self.nodes.version

    @property
    def has_unsaved(self) -> bool:
        """Whether there are nodes that were never on disk."""
        return self.nodes.unsaved.has_new

    def note_once(self, owner: str) -> None:
        """Record that no request returns to nodes that only `owner` stores: they go first."""
        self._once.add(owner)

    def lookup(self, key: TokenKey, owner: str) -> PrefixHit:
        """Return the longest restorable prefix of a prompt; one token is always left.

        Args:
            owner: Its path is not evicted until `release`.
        """
        found = self.nodes.tree.match(key)
        self._prompts[owner] = key
        path = _pieces(found)
        length = self._usable(path, len(key) - 1)
        beyond, place = _tokens_beyond(found)
        in_reply = place is Place.REPLY
        is_hit = length >= MIN_HIT_TOKENS
        self._books.note_prompt(owner, key, found, length if is_hit else 0)
        if not is_hit:
            return PrefixHit(HitKind.MISS, 0, (), found.length, beyond, in_reply)
        last = next(node for node in found.nodes if node.end >= length)
        if owner not in self.nodes.held:
            self._learned.note_prompt(found)
        self.nodes.touch(last)
        for node in () if owner in self._once else last.lineage():
            node.is_once = False
        self.nodes.held[owner] = last
        pieces = _cut_path(path, length)
        return PrefixHit(_kind_of(found, key), length, pieces, found.length, beyond, in_reply)

    def preview(self, key: TokenKey) -> tuple[Piece, ...]:
        """Return the path that `lookup` would restore, without side effects."""
        path = self.path(key)
        length = self._usable(path, len(key) - 1)
        return _cut_path(path, length) if length >= MIN_HIT_TOKENS else ()

    def use(self, owner: str, key: TokenKey) -> None:
        """Record that `owner` uses a stored prefix in place; an empty one ends the use.

        It stays until `release`, whatever the budget: evicting it would free no memory.
        """
        found = self.nodes.tree.match(key)
        self._used_tokens = None
        if found.last is None:
            self.nodes.used.pop(owner, None)
        else:
            self.nodes.used[owner] = (found.last, found.length)

    def used_tokens(self, key: TokenKey) -> int:
        """Return the tokens that would be in use with a prefix added, shared ones counted once."""
        if len(key):
            return self.nodes.used_tokens(key)
        if self._used_tokens is None:
            self._used_tokens = self.nodes.used_tokens(key)
        return self._used_tokens

    def release(self, owner: str) -> None:
        """Allow the path of `owner` to be evicted again."""
        self.nodes.used.pop(owner, None)
        self._used_tokens = None
        self._once.discard(owner)
        node = self.nodes.held.pop(owner, None)
        prompt = self._prompts.pop(owner, ())
        self._books.forget(owner, node)
        if node is not None:
            self._released[owner] = node, len(prompt)
            if len(self._released) > MAX_RELEASED:
                self._released.popitem(last=False)
        self._settle()

    def stored(self, key: TokenKey) -> int:
        """Return the number of first tokens of `key` that are stored."""
        return self.nodes.tree.match(key).length

    def path(self, key: TokenKey) -> tuple[Piece, ...]:
        """Return the stored path of `key`, from its first token on."""
        return _pieces(self.nodes.tree.match(key))

    def has_snapshot(self, key: TokenKey) -> bool:
        """Tell whether the state after the last token of `key` is stored."""
        found = self.nodes.tree.match(key)
        last = found.last
        if last is None or not found.length == last.end == len(key):
            return False
        return last.value.snapshot is not None

    def insert(
        self,
        key: TokenKey,
        start: int,
        segment: Segment,
        *,
        owner: str | None = None,
        is_saved: bool = False,
        place: Place = Place.INNER,
    ) -> bool:
        """Store the missing part of a prefix.

        Args:
            start: The first position of `segment`; all tokens before it should be stored.
            segment: KV of `key[start:]`, perhaps none, and the state after it, computed.
            owner: Its path is not evicted until `release`; `None` holds nothing.

        Returns:
            Whether the prefix is stored now: false if the part before `start` was evicted, or if
            there is no room.
        """
        is_new = self.stored(key) < len(key)
        others = (prompt for name, prompt in self._prompts.items() if name != owner)
        is_awaited = is_saved or any(each.packed.startswith(key.packed) for each in others)
        node = self.nodes.insert(key, start, segment, place, is_awaited=is_awaited)
        if node is not None and is_new:
            node.is_once = owner in self._once
        if node is not None and owner is not None:
            self.nodes.held[owner] = node
        if node is not None and self._on_evict is not None and not is_saved:
            self.nodes.unsaved.add(node, node.start if is_new else node.end)
        self._settle()
        return node is not None

    def refill(self, key: TokenKey, windows_from: int, refill: Refill) -> None:
        """Restore the windows that nodes on the path of a prefix have given up.

        Args:
            windows_from: The first position whose windows `refill` has.
        """
        self.nodes.refill(key, windows_from, refill)
        self._settle()

    def resize(self, budget_bytes: int) -> None:
        """Set the budget, and evict the excess at once."""
        if budget_bytes == self.nodes.budget.nbytes and self.nodes.size.nbytes <= budget_bytes:
            return
        self.nodes.resize(budget_bytes)
        self._settle()

    def pin(self, key: TokenKey) -> None:
        """Evict this prefix, a system prompt, after everything else; no effect unless stored."""
        self.nodes.pin(key)
        self._settle()

    def save(self, write: Callable[[LooseNode], bool]) -> None:
        """Pass the nodes that were never on disk to `write`, until it refuses one.

        The most valuable nodes come first, and none before its parent.
        """
        worths = self.nodes.worth.of_subtrees(self.nodes.tree)
        for node in sorted(self.nodes.unsaved.new, key=lambda node: (-worths[node], node.end)):
            if not write(self.nodes.unsaved_part(node)):
                return
            self.nodes.unsaved.discard(node)

    def note_lost(self, key: TokenKey, start: int) -> None:
        """Record that the disk has lost the tokens of `key` from `start` on."""
        self.nodes.unsaved.note_lost(self.nodes.tree, key, start)

    def expect(self, owner: str, *, is_again: bool = False) -> None:
        """Record that a request is certain to continue soon where `owner` ended.

        Args:
            is_again: Whether it continues at the end of that prompt, and nobody from the reply.
        """
        node, tokens = self._end_of(owner)
        while is_again and node is not None and 0 < tokens <= node.start + 1:
            node.is_spent, node = True, node.parent
        for above in node.lineage() if node is not None and node.is_linked else ():
            above.is_expected |= above is node or above.is_turn

    def _end_of(self, owner: str) -> tuple[SegmentNode | None, int]:
        """Return the end of the path of an owner, and the number of tokens of its prompt."""
        if owner in self.nodes.held:
            return self.nodes.held[owner], len(self._prompts.get(owner, ()))
        return self._released.pop(owner, (None, 0))

    def note_turn(self, owner: str, key: TokenKey) -> None:
        """Record that the next question in the conversation of `owner` branches off after `key`."""
        node = self.nodes.held.get(owner)
        while node is not None and node.end > len(key) > 0:
            node.is_spent, node = True, node.parent
        if node is not None and node.end == len(key):
            node.is_turn, node.is_expected = True, False

    def record(self, tokens: int, hit_tokens: int, kind: HitKind) -> None:
        """Count a prompt that was looked up, and its tokens that were restored in the end."""
        self._books.record(tokens, hit_tokens, kind)
        self.nodes.now += 1
        self._learned.now = self.nodes.now

    def metrics(self) -> Values:
        """Return its numbers."""
        return self._books.metrics(self.nodes)

    def listing(self, request: ListingRequest, *, has_disk: bool) -> PromptCacheListing:
        """List the most valuable nodes, and the tokens that were computed again."""
        return self._books.listing(self.nodes, request, has_disk=has_disk)

    def check(self) -> None:
        """Raise AssertionError unless the counts are right."""
        self.nodes.check()

    def _settle(self) -> None:
        """Compute cut arrays, so that they keep no others alive, and pass evicted nodes on."""
        self.nodes.shrink()
        divided, evicted = self.nodes.take_divided(), self.nodes.take_evicted()
        evaluate(divided)
        self._books.note_evicted(evicted)
        if self._on_evict is not None and evicted:
            self._on_evict(evicted)


def _pieces(found: Match[Segment]) -> tuple[Piece, ...]:
    return tuple(Piece(node.value, tokens) for node, tokens in found.spans())


def _kind_of(found: Match[Segment], key: TokenKey) -> HitKind:
    """Return the kind of a hit on a prompt of which some tokens are stored."""
    last = found.nodes[-1]
    # The last token of a prompt is fed by the first decode step: its entry ends before it.
    entry_ends = {len(key) - 1, len(key)}.intersection(node.end for node in found.nodes)
    if found.length in (len(key) - 1, len(key)) and entry_ends:
        return HitKind.EXACT
    if found.length == len(key):
        return HitKind.LONGER
    ends_there = found.length == last.end and not last.children
    return HitKind.SHORTER if ends_there else HitKind.DIVERGING


def _tokens_beyond(found: Match[Segment]) -> tuple[TokenKey, Place]:
    """Return the tokens stored after a match, up to the end of a node, and its place."""
    last = found.last
    if last is None:
        return TokenKey(b""), Place.INNER
    if found.length < last.end:
        return last.label[found.length - last.start :], last.place
    for child in last.children.values():
        return child.label, child.place
    return TokenKey(b""), Place.INNER


def _cut_path(path: Sequence[Piece], length: int) -> tuple[Piece, ...]:
    """Return the pieces of the first `length` tokens."""
    pieces = []
    for piece in path:
        if length > 0:
            pieces.append(Piece(piece.segment, min(piece.tokens, length)))
        length -= piece.tokens
    return tuple(pieces)
