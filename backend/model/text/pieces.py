"""The bytes of each token id, derived from a tokenizer's decoder.

A byte table detokenizes without the tokenizer and can hold back half a character. It exists
only if the decoder handles every token on its own: byte-level BPE, and SentencePiece with
byte fallback.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        vocabulary: All tokens, including added ones.
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
