"""Tracks JSON in content: a mark in one of its strings is data."""

import re

_OPEN = re.compile(r"[{\[]")
_TOKEN = re.compile(
    r'(?P<space>[ \t\r\n]+)|(?P<string>")|(?P<open>[{\[])|(?P<close>[}\]])'
    r"|(?P<comma>,)|(?P<colon>:)|(?P<word>[-+.0-9A-Za-z]+)"
)
_STRING = re.compile(r'[^"\\\n]+')
_CLOSERS = {"{": "}", "[": "]"}
_VALUE = {"string": "end", "word": "word", "open": ""}
_END = {"comma": "", "close": "end"}
# What may come next, by what is expected, and what is expected after it.
_FOLLOWING: dict[str, dict[str, str]] = {
    "key": {"string": "colon"},
    "first key": {"string": "colon", "close": "end"},
    "colon": {"colon": "value"},
    "value": _VALUE,
    "first value": {**_VALUE, "close": "end"},
    "word": {**_END, "word": "word"},
    "end": _END,
}


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
        self._next = "first key" if bracket == "{" else "first value"

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
        if found is None or not self._fits(found.lastgroup or "", found[0]):
            self.leave()
            return position
        return found.end()

    def _fits(self, kind: str, token: str) -> bool:
        """Advance by a token, if it may come next."""
        if kind == "space":
            return True
        if kind not in _FOLLOWING.get(self._next, ()):
            return False
        if kind == "close" and token != _CLOSERS[self._open.pop()]:
            return False
        self._is_in_string = kind == "string"
        if kind == "open":
            self._begin(token)
        elif kind == "comma":
            self._next = "key" if self._open[-1] == "{" else "value"
        else:
            self._next = _FOLLOWING[self._next][kind]
        return True
