"""Reads the arguments of a tool call as JSON, incrementally."""

import json

from backend.output.readers.values.json_scanner import (
    SURROGATE,
    JsonScanner,
    JsonState,
    call_ends,
)
from backend.output.readers.values.typed_value import ESCAPED_REPLACEMENT


class JsonArguments:
    """Reads an object, directly or inside a JSON string, or `null` or `[]` for no arguments.

    Nothing is emitted before a value in it has begun, which proves that it is an object.

    The last brace is held back: the reader of the call knows when the call is complete.
    """

    def __init__(self, ends: tuple[str, ...] = ()) -> None:
        """Begin before the arguments.

        Args:
            ends: Markers that end the call: strings that may lack their quotes end before them.
        """
        self._scanner = JsonScanner(call_ends(ends))
        self._has_begun = False
        self._is_object = False
        self._wrapped: list[str] = []
        self._doubtful: list[str] = []
        self.is_whole = False
        self.is_malformed = False
        self.missing_end = "{}"

    @staticmethod
    def may_begin_with(char: str) -> bool:
        """Tell whether a non-whitespace character can be their first."""
        return char in '{"n'

    @property
    def kept_back(self) -> int:
        """Number of latest characters read but not emitted."""
        return 1 if self.is_whole else self._scanner.pending

    def feed(self, text: str, position: int) -> tuple[str, int]:
        """Read from a position of `text` up to their end, or to where they are malformed.

        Returns:
            The text that can be emitted, and the position after the text read.
        """
        if not self._has_begun:
            if text[position].isspace():
                return "", position + 1
            self._begin(text[position])
        if self.is_malformed:
            return "", position
        piece, position = self._scanner.feed(text, position)
        self.is_whole = self._scanner.state is JsonState.COMPLETE
        self.is_malformed = self._scanner.state is JsonState.MALFORMED
        if not self._is_object:
            piece = self._unwrap(piece)
        if self.is_whole:
            piece, self.missing_end = piece[:-1], piece[-1]
        return self._certain(piece), position

    def _certain(self, piece: str) -> str:
        """Return a piece, with those before it, once they are certain to be arguments."""
        self._doubtful.append(piece)
        text = "".join(self._doubtful)
        if self.is_whole and text.strip() == "{":
            # An empty object is not emitted before the call is complete.
            self.missing_end = text + self.missing_end
            return ""
        if not (self.is_whole or self._scanner.has_value):
            return ""
        self._doubtful.clear()
        return text

    def _begin(self, char: str) -> None:
        self._has_begun = True
        self._is_object = char == "{"
        self.is_malformed = not (char in "[N" or self.may_begin_with(char))

    def _unwrap(self, piece: str) -> str:
        """Return the object inside a complete value."""
        self._wrapped.append(piece)
        unwrapped = _unwrapped("".join(self._wrapped)) if self.is_whole else ""
        self.is_malformed |= self.is_whole and not unwrapped
        self.is_whole = bool(unwrapped)
        return unwrapped


def _unwrapped(value: str) -> str:
    """Return the object in a JSON string, `{}` if it is empty, `null` or `[]`, else nothing."""
    if value.startswith("["):
        return "" if value[1:-1].strip() else "{}"
    text = (json.loads(value) or "{}").strip()
    scanner = JsonScanner()
    taken, end = scanner.feed(text)
    is_object = taken.startswith("{") and scanner.state is JsonState.COMPLETE and end == len(text)
    return SURROGATE.sub(ESCAPED_REPLACEMENT, taken) if is_object else ""
