"""Divides a long text so that its parts have the same tokens as the whole.

A safe place is the end of a word, before a space and another word: no token spans it and no
pre-tokenizer rule looks across it. Tokenizers that prepend a space to every text get the parts
without the space between them. An experiment tells which kind a tokenizer is.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum

PIECE_CHARS = 32 * 1024
# A search for a place holds Python's lock for so many characters.
_SEARCH_CHARS = 256 * 1024

_PLACE = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
_SPANNING = re.compile(rb"[A-Za-z] [A-Za-z]")
_SAMPLE = (
    "The harbour was quiet before dawn. Three boats, two of them painted blue, lay side by side\n"
    "    and a gull's cry: def walk(self, wall) counted every stone, 1250 of Them ALL\n\nhere and "
    "now it is not"
)


class Joint(Enum):
    """What becomes of the space between two parts; `NONE` means that no place is safe."""

    KEPT = 0
    DROPPED = 1
    NONE = -1


def find_joint(encode: Callable[[str], Sequence[int]], pieces: Iterable[bytes] | None) -> Joint:
    """Return how texts can be divided.

    Args:
        encode: A tokenizer that adds no special tokens.
        pieces: The bytes of all its tokens; `None` if unknown.
    """
    if pieces is None or any(_SPANNING.search(piece) for piece in pieces):
        return Joint.NONE
    whole = list(encode(_SAMPLE))
    for joint in (Joint.KEPT, Joint.DROPPED):
        ends = [match.start() for match in _PLACE.finditer(_SAMPLE)]
        if all(_divided(encode, end, joint) == whole for end in ends):
            return joint
    return Joint.NONE


def divide(
    text: str,
    joint: Joint,
    *,
    piece_chars: int = PIECE_CHARS,
    max_chars: int,
) -> Iterator[str]:
    """Yield the parts of a text.

    Args:
        text: Text of any length.
        joint: The joint of the tokenizer that reads them.
        piece_chars: Target length of a part.
        max_chars: Maximum length if there is no safe place: it is divided anyway, and may get other
            tokens there.
    """
    start = 0
    while len(text) - start > piece_chars:
        end = None if joint is Joint.NONE else _place(text, start, piece_chars, max_chars)
        if end is None:
            if len(text) - start <= max_chars:
                break
            yield text[start : start + max_chars]
            start += max_chars
        else:
            yield text[start:end]
            start = end + joint.value
    yield text[start:]


def _place(text: str, start: int, piece_chars: int, max_chars: int) -> int | None:
    """Return the last safe place within the target length, or the first one after it."""
    stop = start + piece_chars
    places = [match.start() for match in _PLACE.finditer(text, start + piece_chars // 2, stop)]
    if places:
        return places[-1]
    end = min(len(text), start + max_chars)
    for first in range(stop, end, _SEARCH_CHARS):
        # A place begins one character before, and ends one after.
        match = _PLACE.search(text, first - 1, min(first + _SEARCH_CHARS + 1, end))
        if match:
            return match.start()
    return None


def _divided(encode: Callable[[str], Sequence[int]], end: int, joint: Joint) -> list[int]:
    return [*encode(_SAMPLE[:end]), *encode(_SAMPLE[end + joint.value :])]
