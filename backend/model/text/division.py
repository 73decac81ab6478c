"""Where a long text can be divided so that its parts have the tokens of the whole.

No token of a vocabulary reaches over such a place, and no rule of a pre-tokenizer looks across it:
the end of a word, before a space and another word. Tokenizers that put a space before every text
get the parts without the space between them. Which kind a tokenizer is, is tried.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum

PIECE_CHARS = 32 * 1024
# A text without any such place is divided all the same: its tokens may be others there.
MAX_PIECE_CHARS = 1024 * 1024

_PLACE = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
_SPANNING = re.compile(rb"[A-Za-z] [A-Za-z]")
_SAMPLE = (
    "The harbour was quiet before dawn. Three boats, two of them painted blue, lay side by side\n"
    "    and a gull's cry: def walk(self, wall) counted every stone, 1250 of Them ALL\n\nhere and "
    "now it is not"
)


class Joint(Enum):
    """What happens to the space between two parts; `NONE` knows no place that is safe."""

    KEPT = 0
    DROPPED = 1
    NONE = -1


def find_joint(encode: Callable[[str], Sequence[int]], pieces: Iterable[bytes] | None) -> Joint:
    """Return how texts can be divided.

    Args:
        encode: A tokenizer, without special tokens of its own.
        pieces: The bytes of all its tokens; `None` where they are not known.
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
    max_chars: int = MAX_PIECE_CHARS,
) -> Iterator[str]:
    """Yield the parts of a text.

    Args:
        text: Of any length.
        joint: Of the tokenizer that reads them.
        piece_chars: How long a part should be at most.
        max_chars: How long it may be where no place is found.
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
    """Return the last place of a part of the usual length, or the first one after it."""
    stop = start + piece_chars
    places = [match.start() for match in _PLACE.finditer(text, start + piece_chars // 2, stop)]
    if places:
        return places[-1]
    match = _PLACE.search(text, stop, start + max_chars)
    return match.start() if match else None


def _divided(encode: Callable[[str], Sequence[int]], end: int, joint: Joint) -> list[int]:
    return [*encode(_SAMPLE[:end]), *encode(_SAMPLE[end + joint.value :])]
