"""Restricts rows to the tokens that their grammars allow."""

from collections.abc import Sequence
from functools import cache

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from backend.core.guide import ReplyMatcher

_BITS_PER_WORD = 32
_ALL_BITS = -1


class TokenMasks:
    """The masks of a batch; rebuilt whenever its rows change. Belongs to the main thread."""

    def __init__(self, matchers: Sequence[ReplyMatcher | None], vocab_size: int) -> None:
        """Store the matchers of the rows.

        Args:
            matchers: One per row; a row without a matcher allows any token.
            vocab_size: Width of the logits.
        """
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // _BITS_PER_WORD)
        self._guided = [(row, matcher) for row, matcher in enumerate(matchers) if matcher]
        self._bits = self._blank(len(matchers))
        self._penalties = mx.array(_penalties()) if self._guided else None

    def __bool__(self) -> bool:
        """Whether any row has a matcher."""
        return bool(self._guided)

    def apply(self, logits: mx.array) -> mx.array:
        """Mask the tokens that a grammar forbids in logits [B, V].

        Every matcher must have consumed all tokens of its row.
        """
        if self._penalties is None:
            return logits
        for row, matcher in self._guided:
            matcher.fill_mask(self._bits[row])
        return self._masked(logits, self._bits, self._penalties)

    def apply_all(
        self, logits: mx.array, drafts: Sequence[Sequence[int]], latest: Sequence[int]
    ) -> mx.array:
        """Mask the tokens that a grammar forbids after drafts, in logits [N, V].

        Args:
            logits: After the latest token of each row, after each of its drafts, and others.
            drafts: Drafted tokens of each row, which its grammar allows.
            latest: The index after the latest token of each row; those of its drafts follow.
        """
        if self._penalties is None:
            return logits
        bits = self._blank(len(logits))
        for row, matcher in self._guided:
            matcher.fill_mask(bits[latest[row]])
            for place, token_id in enumerate(drafts[row], start=latest[row] + 1):
                matcher.consume(token_id)
                matcher.fill_mask(bits[place])
            matcher.step_back(len(drafts[row]))
        return self._masked(logits, bits, self._penalties)

    def _blank(self, rows: int) -> NDArray[np.int32]:
        return np.full((rows, self._words), _ALL_BITS, np.int32)

    def _masked(self, logits: mx.array, bits: NDArray[np.int32], table: mx.array) -> mx.array:
        if (bits == _ALL_BITS).all():
            return logits
        # Free rows get zeros: on a CPU, gathering and scattering rows takes six times as long.
        penalties = table[mx.array(bits.view(np.uint16))]
        return logits + penalties.reshape(len(bits), -1)[:, : self._vocab_size]


@cache
def _penalties() -> NDArray[np.float32]:
    """Return the terms that 16 mask bits, lowest first, add to logits: [65536, 16], 4 MB."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    bits = np.unpackbits(halves, axis=1, bitorder="little")
    return np.where(bits, np.float32(0), np.float32(-np.inf))
