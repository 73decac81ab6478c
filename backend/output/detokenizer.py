"""Token ids to text, one at a time: whole code points only, and never U+FFFD.

The host's stream ends for good at a U+FFFD, so one that the model itself wrote is dropped too.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WINDOW_TOKENS = 16
# An unfinished code point has at most three bytes, and no token has less than one.
_CONTEXT_TOKENS = 4


class Detokenizer(Protocol):
    """Turns the tokens of one reply into text."""

    def feed(self, token_id: int) -> str:
        """Return the text that is certain with this token; it may be empty."""

    def finish(self) -> str:
        """Return the text that was held back; an incomplete code point is dropped."""


class ByteDetokenizer:
    """For a tokenizer whose tokens stand for fixed bytes."""

    def __init__(self, pieces: Sequence[bytes], *, trims_leading_space: bool) -> None:
        """Begin a reply.

        Args:
            pieces: Token id to bytes; empty for tokens that must not show.
            trims_leading_space: Whether a space at the very start is the tokenizer's, not text.
        """
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        self._trims = trims_leading_space

    def feed(self, token_id: int) -> str:
        """Return the text that is certain with this token; none for an unknown id."""
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
            decode: Token ids to the text that may show; U+FFFD stands for what is no text yet.
        """
        self._decode = decode
        self._window: list[int] = []
        self._sent_chars = 0

    def feed(self, token_id: int) -> str:
        """Return the text that is certain with this token."""
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
        """Decode the window up to where its last code point may still change."""
        return self._decode(self._window).rstrip(_REPLACEMENT)
