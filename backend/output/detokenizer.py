"""Converts token ids to text one at a time: whole code points only, and never U+FFFD.

A U+FFFD would end the host's stream for good, so those written by the model are dropped too.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WINDOW_TOKENS = 16
# An unfinished code point has at most three bytes, and every token at least one.
_CONTEXT_TOKENS = 4


class Detokenizer(Protocol):
    """Converts the tokens of one reply to text."""

    def feed(self, token_id: int) -> str:
        """Return the text that this token makes certain; it may be empty."""

    def finish(self) -> str:
        """Return the text held back so far; an incomplete code point is dropped."""


class ByteDetokenizer:
    """For a tokenizer whose tokens are fixed bytes."""

    def __init__(self, pieces: Sequence[bytes], *, trims_leading_space: bool) -> None:
        """Begin a reply.

        Args:
            pieces: Token id to bytes; empty for hidden tokens.
            trims_leading_space: Whether a space at the very start is an artefact of the tokenizer.
        """
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        self._trims = trims_leading_space

    def feed(self, token_id: int) -> str:
        """Return the text that this token makes certain; empty for an unknown id."""
        if not 0 <= token_id < len(self._pieces):
            return ""
        text = self._decoder.decode(self._pieces[token_id]).replace(_REPLACEMENT, "")
        if self._trims and text:
            self._trims = False
            return text.removeprefix(" ")
        return text

    def finish(self) -> str:
        """Drop an incomplete code point; nothing else is ever held back."""
        self._decoder.reset()
        return ""


class WindowDetokenizer:
    """For a tokenizer that can only decode ids: decodes a sliding window of the latest ones."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Begin a reply.

        Args:
            decode: Converts token ids to visible text, with U+FFFD for incomplete characters.
        """
        self._decode = decode
        self._window: list[int] = []
        self._sent_chars = 0

    def feed(self, token_id: int) -> str:
        """Return the text that this token makes certain."""
        self._window.append(token_id)
        text = self._certain_text()
        fresh = text[self._sent_chars :]
        self._sent_chars = max(self._sent_chars, len(text))
        if len(self._window) == _WINDOW_TOKENS:
            del self._window[:-_CONTEXT_TOKENS]
            self._sent_chars = len(self._certain_text())
        return fresh.replace(_REPLACEMENT, "")

    def finish(self) -> str:
        """Drop an incomplete code point; nothing else is ever held back."""
        return ""

    def _certain_text(self) -> str:
        """Decode the window up to the point where its last code point may still change."""
        return self._decode(self._window).rstrip(_REPLACEMENT)
