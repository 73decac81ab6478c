"""The counts of a prompt cache, and its nodes as people are told of them."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

from backend.cache.eviction.forecast import SegmentNode
from backend.cache.eviction.worth import path_nodes
from backend.cache.kv import LooseNode, Segment
from backend.cache.node_store import NodeStore
from backend.cache.radix import Match
from backend.cache.token_key import BYTES_PER_TOKEN, TokenKey
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
# What is told of a prefix at most.
HEAD_TOKENS = 32
_TOLD = 10
_DIGEST_BYTES = 16
SPAN_S = 300.0
MAX_SPANS = 60
_MIB = 2**20

Worths: TypeAlias = dict[SegmentNode, float]


class Books:
    """Counts lookups, evictions and what was computed again; belongs to the thread of its cache."""

    def __init__(self) -> None:
        self._counts = Counts()
        self._reuse = ReuseHistory()
        self._evicted = EvictedPrefixes()
        self._asked: dict[str, int] = {}

    def note_prompt(self, owner: str, key: TokenKey, found: Match[Segment], length: int) -> None:
        """Count, once for each owner, what it computes though it was stored.

        Args:
            owner: Who looks a prompt up; known until `forget`.
            key: The prompt.
            found: What is stored of it.
            length: Tokens that can be restored.
        """
        if owner in self._asked:
            return
        self._asked[owner] = length
        self._evicted.note_prompt(key, found.length)
        lost = max(min(found.length, len(key) - 1) - length, 0)
        self._counts.add("prompt_cache.stateless_tokens", lost)

    def forget(self, owner: str, end: SegmentNode | None) -> None:
        """Count what an owner has taken up, now that it was divided where the owner left it.

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
            "prompt_cache.bytes": nodes.bytes,
            "prompt_cache.budget_bytes": nodes.budget_bytes,
            "prompt_cache.nodes": len(nodes.tree),
            "prompt_cache.tokens": nodes.tree.tokens,
            "prompt_cache.evictions": nodes.evictions,
            "prompt_cache.recomputed_tokens": self._evicted.recomputed_tokens,
        }

    def listing(
        self, nodes: NodeStore, request: ListingRequest, *, has_disk: bool
    ) -> PromptCacheListing:
        """Return the nodes as `list_prefixes` does, and what was computed again."""
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
    """Knows the last evicted prefixes by digest, and counts those that are wanted again.

    Attributes:
        recomputed_tokens: Of all of them.
    """

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
            self._forget_one()

    def note_prompt(self, key: TokenKey, stored: int) -> None:
        """Count what a prompt has of evicted prefixes; its first `stored` tokens are there."""
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

    def _forget_one(self) -> None:
        """Forget the oldest, one that nobody has wanted again if there is one."""
        unwanted = (digest for digest, each in self._known.items() if not each.times)
        del self._known[next(unwanted, next(iter(self._known)))]


@dataclass(slots=True)
class _Span:
    number: int
    requests: int = 0
    looked_up_tokens: int = 0
    hit_tokens: int = 0


class ReuseHistory:
    """Counts lookups by spans of five minutes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start empty.

        Args:
            clock: In seconds.
        """
        self._clock = clock
        self._spans: deque[_Span] = deque(maxlen=MAX_SPANS)

    def record(self, tokens: int, hit_tokens: int) -> None:
        """Count a prompt and what of it was restored."""
        number = int(self._clock() // SPAN_S)
        if not self._spans or self._spans[-1].number != number:
            self._spans.append(_Span(number))
        span = self._spans[-1]
        span.requests += 1
        span.looked_up_tokens += tokens
        span.hit_tokens += hit_tokens

    def spans(self) -> tuple[ReuseSpan, ...]:
        """Return those of the last five hours, the oldest first."""
        now = self._clock()
        oldest = now // SPAN_S - MAX_SPANS
        return tuple(
            ReuseSpan(
                age_s=now - span.number * SPAN_S,
                requests=span.requests,
                looked_up_tokens=span.looked_up_tokens,
                hit_tokens=span.hit_tokens,
            )
            for span in self._spans
            if span.number > oldest
        )


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
