"""The counts of a prompt cache."""

from collections.abc import Iterable

from backend.cache.books.evicted import EvictedPrefixes
from backend.cache.books.listing import list_prefixes
from backend.cache.books.reuse import ReuseHistory
from backend.cache.eviction.forecast import SegmentNode
from backend.cache.kv import LooseNode, Segment
from backend.cache.node_store import NodeStore
from backend.cache.radix import Match
from backend.cache.token_key import TokenKey
from backend.core.metric_table import Counts, Values
from backend.core.prompt_cache import HitKind, ListingRequest, PromptCacheListing


class Books:
    """Counts lookups, evictions and what was computed again; belongs to the thread of its cache."""

    def __init__(self) -> None:
        self._counts = Counts()
        self._stateless_tokens = 0
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
        self._stateless_tokens += max(min(found.length, len(key) - 1) - length, 0)

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
            stateless_tokens=self._stateless_tokens,
        )
