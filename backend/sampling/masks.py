"""Keep rows to the tokens that their grammars allow."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from backend.core.guide import ReplyMatcher

_BITS_PER_WORD = 32


@dataclass(frozen=True, slots=True)
class Guided:
    """A row of a batch that follows a grammar."""

    row: int
    matcher: ReplyMatcher


class TokenMasks:
    """The masks of a batch; made anew whenever the rows change. Belongs to the engine thread."""

    def __init__(self, guided: Sequence[Guided], vocab_size: int) -> None:
        """Take the rows that follow a grammar.

        Args:
            guided: In the order of the batch.
            vocab_size: Width of the logits.
        """
        self._guided = guided
        self._vocab_size = vocab_size
        words = -(-vocab_size // _BITS_PER_WORD)
        self._bits = np.zeros((len(guided), words), np.int32)
        self._penalties = _penalties() if guided else None

    def __bool__(self) -> bool:
        """Whether there is anything to mask."""
        return bool(self._guided)

    def apply(self, logits: mx.array) -> mx.array:
        """Return logits [B, V] in which what a grammar forbids is impossible.

        Every matcher must have consumed all tokens of its row.
        """
        if self._penalties is None:
            return logits
        for bits, guided in zip(self._bits, self._guided, strict=True):
            guided.matcher.fill_mask(bits)
        octets = mx.array(self._bits.view(np.uint8))
        forbidden = self._penalties[octets].reshape(len(self._guided), -1)[:, : self._vocab_size]
        rows = mx.array([guided.row for guided in self._guided])
        masked = logits[:]
        masked[rows] = logits[rows] + forbidden
        return masked


def _penalties() -> mx.array:
    """Return for every octet of bits, lowest first, what is added to eight logits: [256, 8]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return mx.array(np.where(bits, 0.0, -np.inf).astype(np.float32))
