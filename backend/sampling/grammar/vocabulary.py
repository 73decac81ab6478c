"""A model's tokens, in the form that grammars need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from llguidance import LLTokenizer, TokenizerWrapper

from backend.errors import GrammarError
from backend.sampling.grammar.charset import MAX_CODE_POINT, CharSet, Range

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence

    from backend.core.model import ModelCard

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
    """A model's tokens in llguidance's form; made once and shared by all threads.

    Takes one to two seconds to make for 150,000 tokens.

    Attributes:
        tokenizer: Tokenizer for llguidance.
        markers: Texts that are one token and never spelled out: added tokens.
        eos_ids: Tokens that end a reply.
        characters: Characters that can be written, byte by byte if necessary.
        mask_words: Length of a row of int32 with one bit per token.
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        *,
        markers: Mapping[str, int],
        eos_ids: Collection[int],
        size: int,
    ) -> None:
        """Build the tables.

        Args:
            pieces: Bytes by token id; empty for an id without a token.
            markers: Token ids by text.
            eos_ids: At least one.
            size: Width of the model's logits; ids beyond `pieces` are never allowed.
        """
        special_ids = {*markers.values(), *eos_ids}
        self.markers = dict(markers)
        self.eos_ids = frozenset(eos_ids)
        self.characters = _writable(
            {byte for i, piece in enumerate(pieces) if i not in special_ids for byte in piece}
        )
        self.mask_words = -(-size // _BITS_PER_WORD)
        tokens = [*pieces, *[b""] * (size - len(pieces))][:size]
        self.tokenizer = LLTokenizer(
            TokenizerWrapper(_Tokens(tokens, sorted(special_ids), min(eos_ids))),
            n_vocab=size,
            eos_token=sorted(eos_ids),
        )
        self._size = size
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

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what was made for a key, or make it; nothing is forgotten."""
        if key not in self._made:
            self._made[key] = make()
        return cast("T", self._made[key])

    def token_id(self, token: int | str) -> int | None:
        """Return the id of a token given by id or text, or `None` if there is none."""
        if isinstance(token, str):
            return self.markers.get(token)
        return token if token < self._size else None


class _Tokens:
    """Implements the tokenizer interface that llguidance expects."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_ids: list[int], eos_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_id

    def __call__(self, _text: bytes | str) -> list[int]:
        """Tokenize nothing: llguidance needs it only for forced text, which no grammar here has."""
        return []


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
