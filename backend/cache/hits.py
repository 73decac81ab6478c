"""What a prompt finds in the prompt cache."""

from collections.abc import Sequence

from backend.cache.kv import Piece, Segment
from backend.cache.radix import Match
from backend.cache.token_key import TokenKey
from backend.core.prompt import Place
from backend.core.prompt_cache import HitKind


def kind_of(found: Match[Segment], key: TokenKey) -> HitKind:
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


def tokens_beyond(found: Match[Segment]) -> tuple[TokenKey, Place]:
    """Return the tokens stored after a match, up to the end of a node, and its place."""
    last = found.last
    if last is None:
        return TokenKey(b""), Place.INNER
    if found.length < last.end:
        return last.label[found.length - last.start :], last.place
    for child in last.children.values():
        return child.label, child.place
    return TokenKey(b""), Place.INNER


def cut_path(path: Sequence[Piece], length: int) -> tuple[Piece, ...]:
    """Return the pieces of the first `length` tokens."""
    pieces = []
    for piece in path:
        if length > 0:
            pieces.append(Piece(piece.segment, min(piece.tokens, length)))
        length -= piece.tokens
    return tuple(pieces)
