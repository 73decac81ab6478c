"""The hidden states of the latest tokens of a row, for a head that has yet to read them."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

# A head does without those of older tokens.
MOST_TOKENS = 512
# Passes of fewer tokens are kept as a whole.
_WIDE = 32


class _Part(NamedTuple):
    """States [B, T, D] of a pass, of some layers: the first `tokens` of one row are its own."""

    layers: Sequence[mx.array]
    place: int
    tokens: int

    def own(self, first: int = 0) -> mx.array:
        """Return those of its tokens from one on [T, D], of all layers side by side."""
        layers = [states[self.place, first : self.tokens] for states in self.layers]
        return mx.concatenate(layers, axis=-1) if len(layers) > 1 else layers[0]

    def apart(self) -> "_Part":
        """Return the last of them without those of other rows; computed on return."""
        kept = min(self.tokens, MOST_TOKENS)
        own = self.own(self.tokens - kept)[None]
        mx.eval(own)
        return _Part([own], 0, kept)


class RowStates:
    """Those of consecutive tokens of one row; belongs to the main thread.

    Attributes:
        stop: The place of the token after the last of them.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self.stop = 0
        self._parts: deque[_Part] = deque()
        self._count = 0

    @property
    def first(self) -> int:
        """The place of the first token whose state is there."""
        return self.stop - self._count

    def add(self, layers: Sequence[mx.array], place: int, count: int, stop: int) -> None:
        """Take the first `count` of the row at `place` in a pass of the model.

        Args:
            layers: Of each layer that is read, states [B, T, D] of all rows.
            place: Of this one.
            count: How many tokens of the pass it keeps.
            stop: The place of the token after the last of those.
        """
        part = _Part(layers, place, count)
        if layers[0].shape[1] > _WIDE:
            part = part.apart()
        if stop - part.tokens != self.stop:
            self._parts.clear()
            self._count = 0
        self._parts.append(part)
        self._count += part.tokens
        self.stop = stop
        self._forget(self.stop - MOST_TOKENS)

    def taken(self, first: int, stop: int) -> mx.array:
        """Return those [T, D] of some of the tokens, all of which are there; forget others."""
        known = mx.concatenate([part.own() for part in self._parts])
        found = known[first - self.first : stop - self.first]
        # The last one is wanted again, if its token turns out to be the latest still.
        self._forget(stop - 1)
        return found

    def _forget(self, first: int) -> None:
        """Let go of passes that hold none from the place `first` on."""
        while self._parts and self.first + self._parts[0].tokens <= first:
            self._count -= self._parts.popleft().tokens


def padded(states: Sequence[mx.array], width: int) -> mx.array:
    """Return states [B, T, D] of rows of unlike length [T, D], followed by zeros."""
    return mx.stack([mx.pad(row, ((0, width - row.shape[0]), (0, 0))) for row in states])
