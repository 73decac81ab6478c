"""Reads the arguments of a call as JSON, while they arrive."""

import json
import re

from backend.output.readers.json_scanner import SURROGATE, JsonScanner, JsonState, call_ends
from backend.output.readers.patterns import REFUTED, SPACE, UNDECIDED, choice, fixed, sequence
from backend.output.readers.tolerant_json import ODD_QUOTES, NotJsonError, read_json
from backend.output.readers.typed_values import ESCAPED_REPLACEMENT

# Arguments in a list, or a list of none; other brackets may begin a marker.
LISTED = sequence(fixed("["), SPACE, choice(fixed("]"), fixed("{")))
_BEGIN = choice(*map(fixed, ("{", '"', "n", "N")), LISTED)
_WHOLE, _BEGUN = re.compile(_BEGIN.whole), re.compile(_BEGIN.begun)
# What models write in place of an empty object.
NULLS = ("null", "None")
NO_ARGUMENTS = (*NULLS, "[]")


class JsonArguments:
    """Reads an object, perhaps in a JSON string or alone in a list, or `null` or `[]` for none.

    Nothing is emitted before a value in it has begun, which proves that it is an object.

    The last brace is held back: the reader of the call knows when the call is complete.
    """

    def __init__(self, ends: tuple[str, ...] = ()) -> None:
        """Begin before the arguments; strings that lack their quotes end before one of `ends`."""
        self._scanner = JsonScanner(call_ends(ends))
        self._has_begun = False
        self._is_object = False
        self._wrapped: list[str] = []
        self._doubtful: list[str] = []
        self.is_whole = False
        self.is_malformed = False
        self.missing_end = "{}"

    @staticmethod
    def begin_at(text: str, position: int) -> int:
        """Return the position, if they may begin there, `UNDECIDED` or `REFUTED`."""
        if _WHOLE.match(text, position):
            return position
        return UNDECIDED if _BEGUN.fullmatch(text, position) else REFUTED

    @property
    def is_listed(self) -> bool:
        """Whether they are alone in a list."""
        return "".join(self._wrapped[:1]).startswith("[")

    @property
    def is_empty(self) -> bool:
        """Whether they are complete, and an object without members."""
        return self.is_whole and self.missing_end.lstrip().startswith("{")

    @property
    def kept_back(self) -> int:
        """Number of latest characters read but not emitted."""
        return 1 if self.is_whole else self._scanner.pending

    def read_from(self, text: str, position: int) -> tuple[str, int]:
        """Return what can be emitted, and the position after the arguments or at an error."""
        if not self._has_begun:
            if text[position].isspace():
                return "", position + 1
            self._begin(text[position])
        if self.is_malformed:
            return "", position
        piece, position = self._scanner.read_from(text, position)
        self.is_whole = self._scanner.state is JsonState.COMPLETE
        self.is_malformed = self._scanner.state is JsonState.MALFORMED
        if not self._is_object:
            piece = self._unwrap(piece)
        if self.is_whole:
            piece, self.missing_end = piece[:-1], piece[-1]
        return self._certain(piece), position

    def finish(self) -> None:
        """End the text: a `null` is whole, and no longer the beginning of another word."""
        if self._has_begun and not (self._is_object or self.is_whole):
            self.read_from(" ", 0)

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
        self.is_malformed = char not in '{["nN'

    def _unwrap(self, piece: str) -> str:
        """Return the object inside a complete value."""
        self._wrapped.append(piece)
        unwrapped = _unwrapped("".join(self._wrapped)) if self.is_whole else ""
        self.is_malformed |= self.is_whole and not unwrapped
        self.is_whole = bool(unwrapped)
        return unwrapped


def _unwrapped(value: str) -> str:
    """Return the object in a JSON string or list, `{}` if there is none, else nothing."""
    is_list = value.startswith("[")
    text = value[1:-1] if is_list else json.loads(value) or ""
    return _object_in(text.strip())


def _object_in(text: str) -> str:
    """Return a text that is an object, also in Python or in one more string, else nothing."""
    if not text or text in NO_ARGUMENTS:
        return "{}"
    if text.startswith('"'):
        return _object_in(_text_of(text))
    scanner = JsonScanner()
    taken, end = scanner.read_from(text)
    if not taken.startswith("{"):
        return ""
    if scanner.state is not JsonState.COMPLETE or end < len(text):
        taken = _repaired(text)
    return SURROGATE.sub(ESCAPED_REPLACEMENT, taken)


def _text_of(written: str) -> str:
    """Return the text of a JSON string; a text that is no object if it is none."""
    try:
        return str(json.loads(written, strict=False)).strip()
    except ValueError:
        return "?"


def _repaired(text: str) -> str:
    """Return an object that is written as in Python, or nothing."""
    try:
        found = read_json(text, 0, ODD_QUOTES)
    except NotJsonError:
        return ""
    return "" if found.is_open or found.end < len(text) else found.text
