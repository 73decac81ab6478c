"""Segments that are their own token ids: stored ones can be read back, without MLX."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from backend.cache.kv import Piece, Segment, Size
from backend.cache.prompt_cache import PrefixHit, PromptCache
from backend.cache.radix import TokenKey

BYTES_PER_TOKEN = 8
SNAPSHOT_BYTES = 40
ARRAYS_PER_BLOCK = 2


@dataclass(frozen=True)
class TokenBlock:
    """Stands in for a `Block`: some token ids and no arrays."""

    ids: tuple[int, ...]
    has_windows: bool = True
    layers: tuple[()] = ()

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def size(self) -> Size:
        return Size(BYTES_PER_TOKEN * len(self.ids), ARRAYS_PER_BLOCK)

    def split(self, at: int) -> tuple[Self, Self]:
        assert 0 < at < len(self.ids)
        return type(self)(self.ids[:at]), type(self)(self.ids[at:])


@dataclass(frozen=True)
class PrefixSnapshot:
    """Stands in for a `Snapshot`: all tokens up to its place."""

    ids: tuple[int, ...]
    arrays: tuple[()] = ()

    @property
    def size(self) -> Size:
        return Size(SNAPSHOT_BYTES, 1)


def key(*ids: int) -> TokenKey:
    """The key of some token ids."""
    return TokenKey.from_ids(ids)


def room_for(tokens: int, snapshots: int = 0) -> int:
    """The bytes of so many tokens and snapshots."""
    return tokens * BYTES_PER_TOKEN + snapshots * SNAPSHOT_BYTES


def segment_of(ids: Sequence[int], start: int = 0, *, has_snapshot: bool = False) -> Any:
    """The segment of `ids[start:]`, with the state after the last of them if wanted."""
    snapshot: Any = PrefixSnapshot(tuple(ids)) if has_snapshot else None
    blocks: Any = (TokenBlock(tuple(ids[start:])),) if start < len(ids) else ()
    return Segment(blocks, snapshot)


def anywhere(path: Sequence[Piece], limit: int) -> int:
    """How long a prefix can be restored where every layer can be cut."""
    return max(min(sum(piece.tokens for piece in path), limit), 0)


def at_snapshots(path: Iterable[Piece], limit: int) -> int:
    """How long a prefix can be restored where some layer has a state."""
    best = position = 0
    for piece in path:
        position += piece.tokens
        if piece.snapshot is not None and position <= limit:
            best = position
    return best


def tokens_of(hit: PrefixHit) -> tuple[int, ...]:
    """The tokens that the path of a hit is made of."""
    blocks: Any = [block for piece in hit.path for block in piece.blocks()]
    return tuple(token for block, taken in blocks for token in block.ids[:taken])


def put(
    store: PromptCache, ids: Sequence[int], *, owner: str | None = None, has_snapshot: bool = False
) -> bool:
    """Store the missing part of `ids`, as the engine does."""
    start = store.stored(key(*ids))
    segment = segment_of(ids, start, has_snapshot=has_snapshot)
    is_there = store.insert(key(*ids), start, segment, owner=owner)
    store.check()
    return is_there


def is_stored(store: PromptCache, ids: Sequence[int]) -> bool:
    """Tell whether all of `ids` is stored."""
    return store.stored(key(*ids)) == len(ids)


def look(store: PromptCache, ids: Sequence[int], *, owner: str = "reader") -> PrefixHit:
    """Look `ids` up, hold nothing, and check that the tokens found are those of `ids`."""
    hit = store.lookup(key(*ids), owner)
    store.release(owner)
    assert tokens_of(hit) == tuple(ids[: hit.length])
    return hit
