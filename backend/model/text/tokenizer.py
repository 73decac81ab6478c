"""Converts text to token ids and back, on any thread."""

import json
import re
import time
from array import array
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from backend.core.scoring import PlacedToken
from backend.model.checkpoint.upstream import HfTokenizer
from backend.model.text.reading import (
    NUMBER_TYPE,
    PIECE_CHARS,
    Joint,
    added_ids,
    divide,
    find_joint,
    reader_of,
)
from common.rpc import require_caller

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_STEP = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_STRIP_STEP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_SENTENCEPIECE = [_SPACE_STEP, {"type": "ByteFallback"}, {"type": "Fuse"}]


@dataclass(frozen=True, slots=True)
class PieceTable:
    """Maps token ids to bytes; ids without a token have none.

    Attributes:
        trims_leading_space: Whether decoding drops one space at the start of a text.
    """

    pieces: Sequence[bytes]
    trims_leading_space: bool = False


def piece_table(decoder: Mapping[str, Any], vocabulary: Mapping[str, int]) -> PieceTable | None:
    """Build the table, or return `None` for a decoder that looks at several tokens at once.

    Args:
        decoder: The `decoder` of a tokenizer.json.
    """
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        return PieceTable(_by_id(vocabulary, _byte_level_pieces(vocabulary)))
    if steps in (_SENTENCEPIECE, [*_SENTENCEPIECE, _STRIP_STEP]):
        pieces = _by_id(vocabulary, [_sentencepiece_piece(token) for token in vocabulary])
        return PieceTable(pieces, trims_leading_space=steps[-1] == _STRIP_STEP)
    return None


def _by_id(vocabulary: Mapping[str, int], pieces: Sequence[bytes]) -> Sequence[bytes]:
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token_id, piece in zip(vocabulary.values(), pieces, strict=True):
        table[token_id] = piece
    return tuple(table)


def _byte_level_pieces(vocabulary: Mapping[str, int]) -> list[bytes]:
    """Undo GPT-2's byte alphabet; a token with any other character is plain text."""
    alphabet = _byte_alphabet()
    letters = alphabet.keys()
    return [
        bytes(alphabet[letter] for letter in token) if letters >= set(token) else token.encode()
        for token in vocabulary
    ]


def _byte_alphabet() -> dict[str, int]:
    """Map printable Latin-1 characters to themselves, and U+0100 upwards to the other bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)).difference(printable))
    shifted = {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


def _sentencepiece_piece(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(match[1])
    return token.replace("▁", " ").encode()


# Pause between two parts of a long text, so that other threads get their turn.
_YIELD_S = 0.0005


class Tokenizer:
    """A Hugging Face tokenizer for many threads, and the facts needed for detokenizing.

    Attributes:
        special_ids: Ids whose text is markup for the model, not for a reader.
        added_texts: Texts of all added tokens by id, special or not.
    """

    def __init__(self, hf_tokenizer: HfTokenizer, *, bos_id: int | None = None) -> None:
        """Read the tables.

        Args:
            hf_tokenizer: Owned by this object from now on.
            bos_id: Begins raw prompts instead of the tokenizer's own BOS.
        """
        self.hf = hf_tokenizer
        self._reader = reader_of(hf_tokenizer)
        self._visible: dict[frozenset[int], Sequence[bytes]] = {}
        self.vocabulary = vocabulary_of(hf_tokenizer)
        self._is_known = _known_ids(hf_tokenizer)
        self.special_ids = _special_ids(hf_tokenizer)
        self.added_texts: Mapping[int, str] = {
            token_id: token.content for token_id, token in hf_tokenizer.added_tokens_decoder.items()
        }
        self.special_texts: Mapping[int, str] = {
            token_id: hf_tokenizer.convert_ids_to_tokens(token_id)
            for token_id in sorted(self.special_ids)
        }
        self._prefix = list(self.added_ids[0]) if bos_id is None else [bos_id]

    @property
    def pieces(self) -> Sequence[bytes] | None:
        """Token id to bytes, or `None` if only `decode` can tell."""
        return self._table.pieces if self._table else None

    @property
    def trims_leading_space(self) -> bool:
        """Whether decoding drops one space at the start of a text."""
        return self._table is not None and self._table.trims_leading_space

    @cached_property
    def longest_piece_bytes(self) -> int:
        """Maximum number of bytes per token."""
        pieces = self.pieces or [token.encode() for token in self.vocabulary]
        return max(map(len, pieces), default=0)

    @cached_property
    def _table(self) -> PieceTable | None:
        """Read on first use: 260,000 tokens take a second, and engines may never need it."""
        return _piece_table(self.hf)

    def encode(self, text: str, *, adds_special: bool) -> list[int]:
        """Return the token ids of `text`, as `encode_packed` does."""
        return list(self.encode_packed(text, adds_special=adds_special))

    def encode_packed(self, text: str, *, adds_special: bool) -> Sequence[int]:
        """Return the token ids of `text`; markers in it become special tokens.

        A long text is encoded in parts, and abandoned between two parts if no one waits for it. Its
        ids are an array: a list of millions holds Python's lock for a tenth of a second.

        Args:
            text: Any text without lone surrogates.
            adds_special: Whether to add the tokenizer's own tokens, such as BOS.

        Raises:
            AbandonedError: The caller has gone.
        """
        if len(text) <= min(PIECE_CHARS, self._reader.direct_chars):
            return self._reader.encode(text, adds_special=adds_special)
        before, after = self.added_ids if adds_special else ((), ())
        ids = array(NUMBER_TYPE, before)
        for part in divide(text, self._joint, max_chars=self._reader.max_chars or len(text)):
            require_caller()
            ids.extend(self._reader.encode(part, adds_special=False))
            time.sleep(_YIELD_S)
        ids.extend(after)
        return ids

    def encode_pair(
        self, first: str, second: str, *, limit: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Return the token ids of two texts read as one, and the index of each token's text.

        Args:
            first: Never truncated.
            second: Truncated at its end to fit.
            limit: Maximum number of tokens; `first` alone must fit.
        """
        return self._reader.encode_pair(first, second, limit)

    def placed(self, text: str) -> list[PlacedToken]:
        """Return the tokens of a text with their positions, without the tokenizer's additions."""
        return [
            PlacedToken(token_id, start, stop, word)
            for token_id, (start, stop), word in self._reader.placed(text)
        ]

    def read_elsewhere_beyond(self, chars: int) -> None:
        """Have longer texts read in a process that can be ended; at load only."""
        self._reader.direct_chars = min(chars, self._reader.direct_chars)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a raw prompt, as `encode_prompt_packed` does."""
        return list(self.encode_prompt_packed(text))

    def encode_prompt_packed(self, text: str) -> Sequence[int]:
        """Return the ids of a raw prompt, with exactly one BOS if the model uses one."""
        ids = self.encode_packed(text, adds_special=False)
        if list(ids[: len(self._prefix)]) == self._prefix:
            return ids
        if isinstance(ids, array):
            return array(NUMBER_TYPE, self._prefix) + ids
        return [*self._prefix, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, including special tokens; ids without a token are skipped."""
        return self._reader.decode(list(filter(self._is_known, ids)))

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with exactly this text, if there is one."""
        return self.vocabulary.get(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for an id without one."""
        if self.pieces is None:
            return self.decode([token_id]).encode()
        return self.pieces[token_id] if token_id < len(self.pieces) else b""

    def visible_pieces(self, markers: Container[str]) -> Sequence[bytes] | None:
        """Return the piece table with special tokens blanked, except those in `markers`.

        Returns `None` without a table. Equal markers return the same object.
        """
        if self.pieces is None:
            return None
        hidden = self._hidden_ids(markers)
        if hidden not in self._visible:
            self._visible[hidden] = tuple(
                b"" if token_id in hidden else piece for token_id, piece in enumerate(self.pieces)
            )
        return self._visible[hidden]

    def visible_decoder(self, markers: Container[str]) -> Callable[[Sequence[int]], str]:
        """Return a decoder that leaves out special tokens, except those in `markers`."""
        hidden = self._hidden_ids(markers)
        return lambda ids: self.decode([token_id for token_id in ids if token_id not in hidden])

    def _hidden_ids(self, markers: Container[str]) -> frozenset[int]:
        return frozenset(
            token_id for token_id, text in self.special_texts.items() if text not in markers
        )

    @property
    def normalized(self) -> Callable[[str], str] | None:
        """The normaliser, if special tokens are found in its result."""
        added = self.hf.added_tokens_decoder.values() if self.hf.is_fast else ()
        if any(token.normalized and not token.content.isspace() for token in added):
            normalizer = self.hf.backend_tokenizer.normalizer
            return None if normalizer is None else normalizer.normalize_str
        return None

    @cached_property
    def _joint(self) -> Joint:
        return find_joint(lambda text: self._reader.encode(text, adds_special=False), self.pieces)

    @cached_property
    def added_ids(self) -> tuple[Sequence[int], Sequence[int]]:
        """Ids that the tokenizer adds before and after a text."""
        return added_ids(self._reader.encode)


class FastVocabulary(Mapping[str, int]):
    """The tokens of a Rust tokenizer, which are in its memory only: 260,000 in Python take 60 MB.

    Going through all of them copies them.
    """

    def __init__(self, hf_tokenizer: HfTokenizer) -> None:
        self._fast = hf_tokenizer.backend_tokenizer

    def __getitem__(self, token: str) -> int:
        token_id: int | None = self._fast.token_to_id(token)
        if token_id is None:
            raise KeyError(token)
        return token_id

    def __iter__(self) -> Iterator[str]:
        return iter(self._fast.get_vocab())

    def __len__(self) -> int:
        return int(self._fast.get_vocab_size())


def vocabulary_of(hf_tokenizer: HfTokenizer) -> Mapping[str, int]:
    """Return all tokens with their ids, including added ones."""
    if hf_tokenizer.is_fast:
        return FastVocabulary(hf_tokenizer)
    return MappingProxyType(hf_tokenizer.get_vocab())


def _known_ids(hf_tokenizer: HfTokenizer) -> Callable[[int], bool]:
    """Return a test of whether an id can be decoded; a Rust tokenizer skips unknown ones."""
    if hf_tokenizer.is_fast:
        return range(2**32).__contains__
    return frozenset(hf_tokenizer.get_vocab().values()).__contains__


def _special_ids(hf_tokenizer: HfTokenizer) -> frozenset[int]:
    added = hf_tokenizer.added_tokens_decoder
    marked = (token_id for token_id, token in added.items() if token.special)
    return frozenset(marked) | frozenset(hf_tokenizer.all_special_ids)


def _piece_table(hf_tokenizer: HfTokenizer) -> PieceTable | None:
    if not hf_tokenizer.is_fast or hf_tokenizer.backend_tokenizer.decoder is None:
        return None
    # A decoder's state is its JSON; the whole tokenizer's would be megabytes.
    decoder = json.loads(hf_tokenizer.backend_tokenizer.decoder.__getstate__())
    return piece_table(decoder, hf_tokenizer.get_vocab())
