"""Tracks JSON in content: a mark in one of its strings is data."""

import re

_OPEN = re.compile(r"[{\[]")
_TOKEN = re.compile(
    r'(?P<space>[ \t\r\n]+)|(?P<string>")|(?P<open>[{\[])|(?P<close>[}\]])'
    r"|(?P<comma>,)|(?P<colon>:)|(?P<word>[-+.0-9A-Za-z]+)"
)
_STRING = re.compile(r'[^"\\\n]+')
_CLOSERS = {"{": "}", "[": "]"}


class JsonText:
    """Tells whether the content so far ends inside a string of an object or an array.

    Any brace or bracket may begin one. Text that is not JSON ends it, and so does a line break in
    a string.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._next = ""
        self._is_in_string = False
        self._is_escaped = False

    @property
    def is_in_string(self) -> bool:
        """Whether a string is open."""
        return self._is_in_string

    def feed(self, text: str) -> None:
        """Read more text."""
        position = 0
        while position < len(text):
            if self._is_in_string:
                position = self._read_string(text, position)
            elif self._open:
                position = self._read_token(text, position)
            elif found := _OPEN.search(text, position):
                self._begin(found[0])
                position = found.end()
            else:
                return

    def leave(self) -> None:
        """Treat what follows as other text."""
        self._open.clear()
        self._is_in_string = self._is_escaped = False

    def _begin(self, bracket: str) -> None:
        self._open.append(bracket)
        self._next = "key}" if bracket == "{" else "value]"

    def _read_string(self, text: str, position: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return position + 1
        if plain := _STRING.match(text, position):
            return plain.end()
        char = text[position]
        self._is_escaped = char == "\\"
        if char == "\n":
            self.leave()
        elif char == '"':
            self._is_in_string = False
        return position + 1

    def _read_token(self, text: str, position: int) -> int:
        found = _TOKEN.match(text, position)
        kind = found.lastgroup if found else None
        if found is None or not self._fits(kind, found[0]):
            self.leave()
            return position
        return found.end()

    def _fits(self, kind: str | None, token: str) -> bool:
        """Advance by a token, if it may come next."""
        expected = self._next
        match kind:
            case "space":
                return True
            case "string" if expected.startswith(("key", "value")):
                self._is_in_string = True
                self._next = ":" if expected.startswith("key") else ",]"
                return True
            case "word" if expected.startswith(("value", "word")):
                self._next = "word"
                return True
            case "open" if expected.startswith("value"):
                self._begin(token)
                return True
            case "comma" if expected in (",]", "word"):
                self._next = "key" if self._open[-1] == "{" else "value"
                return True
            case "colon" if expected == ":":
                self._next = "value"
                return True
            case "close" if token == _CLOSERS[self._open[-1]]:
                self._open.pop()
                self._next = ",]"
                return expected not in ("key", "value", ":")
            case _:
                return False
