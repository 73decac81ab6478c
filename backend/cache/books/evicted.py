"""The prefixes that were evicted, to tell which of them had to be computed again."""

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

from backend.cache.token_key import BYTES_PER_TOKEN, TokenKey
from backend.core.prompt_cache import RecomputedPrefix

MAX_KNOWN = 256
# What is told of a prefix at most.
HEAD_TOKENS = 32
_TOLD = 10
_DIGEST_BYTES = 16


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
