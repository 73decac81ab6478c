"""A model's tokens, in the form that grammars need."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, count
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from backend.errors import GrammarError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence

    from backend.core.model import ModelCard

MAX_CODE_POINT = 0x10FFFF
# Surrogates are not characters: UTF-8 cannot encode them.
_SURROGATES = 0xD800, 0xDFFF

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CharSet:
    """A set of characters; build it with `of`, so that equal sets are equal values.

    Attributes:
        ranges: First and last code points; ascending, neither overlapping nor adjacent.
    """

    ranges: tuple[Range, ...]

    @classmethod
    def of(cls, ranges: Iterable[Range]) -> CharSet:
        """Return the characters in any of `ranges`."""
        merged: list[Range] = []
        for low, high in sorted(ranges):
            if merged and low <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(merged[-1][1], high))
            else:
                merged.append((low, high))
        return cls(tuple(_without_surrogates(merged)))

    @classmethod
    def single(cls, character: str) -> CharSet:
        """Return the set of one character."""
        return cls(((ord(character), ord(character)),))

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __contains__(self, character: str) -> bool:
        index = bisect_right(self.ranges, (ord(character), MAX_CODE_POINT)) - 1
        return index >= 0 and ord(character) <= self.ranges[index][1]

    def __invert__(self) -> CharSet:
        gaps: list[Range] = []
        start = 0
        for low, high in self.ranges:
            if start < low:
                gaps.append((start, low - 1))
            start = high + 1
        if start <= MAX_CODE_POINT:
            gaps.append((start, MAX_CODE_POINT))
        return CharSet.of(gaps)

    def __or__(self, other: CharSet) -> CharSet:
        return CharSet.of([*self.ranges, *other.ranges])

    def __and__(self, other: CharSet) -> CharSet:
        return self if other == ANY_CHARACTER else ~(~self | ~other)


def _without_surrogates(ranges: list[Range]) -> list[Range]:
    first, last = _SURROGATES
    kept: list[Range] = []
    for low, high in ranges:
        if high < first or last < low:
            kept.append((low, high))
            continue
        if low < first:
            kept.append((low, first - 1))
        if last < high:
            kept.append((last + 1, high))
    return kept


ANY_CHARACTER = ~CharSet(())


T = TypeVar("T")
_BITS_PER_WORD = 32
_MAX_RANGES = 256
# The part of a character that a continuation byte of UTF-8 holds.
_SIX_BITS = 0x00, 0x3F
_ASCII = CharSet.of([(0x00, 0x7F)])
# Characters of two, three and four bytes in UTF-8.
_SPELLABLE = {
    2: CharSet.of([(0x80, 0x7FF)]),
    3: CharSet.of([(0x800, 0xFFFF)]),
    4: CharSet.of([(0x10000, MAX_CODE_POINT)]),
}


class TokenTexts(Protocol):
    """The texts of tokens."""

    @property
    def added_texts(self) -> Mapping[int, str]:
        """Texts of tokens that are never spelled out, by id."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for an id without one."""


class Vocabulary:
    """The texts that a model can write, and their tokens; shared by all threads.

    Attributes:
        pieces: Bytes by token id; empty for an id without a token.
        alphabet: The bytes in tokens, without markers.
        markers: Texts that are one token and never spelled out: added tokens.
        eos_ids: Tokens that end a reply.
        characters: Characters that can be written, byte by byte if necessary.
        mask_words: Length of a row of int32 with one bit per token.
        size: Number of ids.
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        *,
        markers: Mapping[str, int],
        eos_ids: Collection[int],
        size: int,
    ) -> None:
        """Build the tables; `size` is the logits' width; ids beyond `pieces` are not allowed."""
        special_ids = {*markers.values(), *eos_ids}
        self.markers = dict(markers)
        self.eos_ids = frozenset(eos_ids)
        spelled = (piece for i, piece in enumerate(pieces) if i not in special_ids)
        self.alphabet = bytes(sorted(set(chain.from_iterable(spelled))))
        self.characters = _writable(self.alphabet)
        self.mask_words = -(-size // _BITS_PER_WORD)
        self.pieces = [*pieces, *[b""] * (size - len(pieces))][:size]
        self.size = size
        self._made: dict[Hashable, object] = {}

    @classmethod
    def of(cls, tokenizer: TokenTexts, card: ModelCard) -> Vocabulary:
        """Return the vocabulary of a loaded model.

        Raises:
            GrammarError: The model has no token that ends a reply.
        """
        if not card.eos_token_ids:
            raise GrammarError("no token ends a reply of this model")
        return cls(
            [tokenizer.token_bytes(i) for i in range(card.vocab_size)],
            markers={text: i for i, text in tokenizer.added_texts.items()},
            eos_ids=card.eos_token_ids,
            size=card.vocab_size,
        )

    @classmethod
    def spelling(
        cls, alphabet: bytes, markers: Mapping[str, int], eos_ids: Collection[int], size: int
    ) -> Vocabulary:
        """Return a vocabulary that writes another one's texts byte by byte, from its attributes.

        Markers and ends keep their ids. The cost of compiling a grammar hardly depends on the other
        tokens, and a small vocabulary is made at once.
        """
        special = dict.fromkeys(eos_ids, b"end") | {i: t.encode() for t, i in markers.items()}
        free = (i for i in count() if i not in special)
        letters = {i: bytes([byte]) for byte, i in zip(alphabet, free, strict=False)}
        texts = letters | special
        width = max(size, *(i + 1 for i in texts))
        pieces = [texts.get(i, b"") for i in range(width)]
        made = cls(pieces, markers=markers, eos_ids=eos_ids, size=width)
        made.size = size
        return made

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value made for a key, or make it; nothing is forgotten."""
        if key not in self._made:
            self._made[key] = make()
        return cast("T", self._made[key])

    def token_id(self, token: int | str) -> int | None:
        """Return the id of a token given by id or text, or `None` if there is none."""
        if isinstance(token, str):
            return self.markers.get(token)
        return token if token < self.size else None


def _writable(alphabet: Collection[int]) -> CharSet:
    """Return the characters whose UTF-8 consists of these bytes."""
    written = CharSet.of((byte, byte) for byte in alphabet if byte < 0x80)
    ends = CharSet.of((byte & 0x3F, byte & 0x3F) for byte in alphabet if byte & 0xC0 == 0x80)
    for length, spellable in _SPELLABLE.items():
        lead = 0xFF00 >> length & 0xFF
        starts = [byte ^ lead for byte in alphabet if byte & ~(0x7F >> length) == lead]
        spelled = CharSet.of((start, start) for start in starts)
        for _ in range(length - 1):
            spelled = CharSet.of(_followed(spelled.ranges, ends.ranges))
        written |= spelled & spellable
    if len(written.ranges) > _MAX_RANGES:  # as good as all characters, and cheaper to write
        return (written & _ASCII) | ~_ASCII
    return written


def _followed(starts: Sequence[Range], ends: Sequence[Range]) -> Iterator[Range]:
    """Return the numbers of any start followed by any end of six bits."""
    for first, last in starts:
        if ends == (_SIX_BITS,):
            yield first << 6, last << 6 | 0x3F
            continue
        for start in range(first, last + 1):
            yield from ((start << 6 | low, start << 6 | high) for low, high in ends)
