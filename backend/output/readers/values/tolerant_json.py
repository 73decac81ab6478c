"""Converts JSON with models' typical errors to valid JSON."""

import json
import re
from dataclasses import dataclass

from backend.output.readers.values.json_scanner import SURROGATE, is_number
from backend.output.readers.values.typed_value import json_string

_SPACE = re.compile(r"\s*")
_BARE = re.compile(r"[^,{}\[\]()\n]+")
_BARE_KEY = re.compile(r"[^\s:=,{}\[\]()\"']+")
_HALF_QUOTED_KEY = re.compile(r"[\w-]+[ \t]*:[ \t]*[^\s:]")
_ASSIGN = re.compile(r"\s*(?:=>|:|=)\s*")
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_ODD = re.compile(r"""\\["\\/bfnrtu']|["\\\x00-\x1f]""")
_FOLLOWERS = frozenset(",:=}])")
_MAX_DEPTH = 64


class NotJsonError(ValueError):
    """The text cannot be read as JSON."""


@dataclass(frozen=True, slots=True)
class Repaired:
    """A value as read.

    Attributes:
        text: The value as JSON.
        end: The position after it.
        reasons: The repairs made, each once.
    """

    text: str
    end: int
    reasons: tuple[str, ...]


def read_json(text: str, position: int, quotes: tuple[str, ...] = ('"', "'")) -> Repaired:
    """Read a value that begins at a position.

    Also accepted: keys and strings without quotes or in other quotes, quotes inside strings,
    Python's constants, missing and superfluous commas, `=` for a colon, and missing closing
    brackets at the end of the text.

    Args:
        text: A text that ends with the call.
        position: Start of the value; whitespace is skipped.
        quotes: Texts around strings, longer ones first.

    Raises:
        NotJsonError: There is no value, or it ends inside a string.
    """
    reader = _Reader(text, quotes)
    value = reader.value(_skip(text, position), 0)
    return Repaired(value, reader.end, tuple(dict.fromkeys(reader.reasons)))


def read_members(text: str, position: int, quotes: tuple[str, ...]) -> Repaired:
    """Read an object from the position after its bracket, which may be of another kind.

    Raises:
        NotJsonError: There is none, or it ends inside a string.
    """
    reader = _Reader(text, quotes)
    value = reader.members(position, "}", 0)
    return Repaired(value, reader.end, tuple(dict.fromkeys(reader.reasons)))


def _skip(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position


class _Reader:
    """Reads one value; `end` is the position after the latest part read."""

    def __init__(self, text: str, quotes: tuple[str, ...]) -> None:
        self._text = text
        self._quotes = quotes
        self.end = 0
        self.reasons: list[str] = []

    def value(self, position: int, depth: int) -> str:
        if depth > _MAX_DEPTH or position >= len(self._text):
            raise NotJsonError
        char = self._text[position]
        if char == "{":
            return self.members(position + 1, "}", depth)
        if char in "[(":
            return self._items(position + 1, _CLOSERS[char], depth)
        if quote := self._quote_at(position):
            return self._string(position, quote)
        return self._bare(position)

    def members(self, position: int, closer: str, depth: int) -> str:
        """Read the members of an object, up to its closing bracket."""
        found: list[str] = []
        while not self._closes(position := self._next(position), closer):
            key = self._key(position)
            assign = _ASSIGN.match(self._text, self.end)
            if assign is None:
                raise NotJsonError
            if ":" not in assign[0]:
                self.reasons.append("an equals sign instead of a colon")
            found.append(f"{key}: {self.value(assign.end(), depth + 1)}")
            position = self.end
        return f"{{{', '.join(found)}}}"

    def _items(self, position: int, closer: str, depth: int) -> str:
        found: list[str] = []
        while not self._closes(position := self._next(position), closer):
            found.append(self.value(position, depth + 1))
            position = self.end
        return f"[{', '.join(found)}]"

    def _next(self, position: int) -> int:
        """Return the position of the next member, after commas."""
        position = _skip(self._text, position)
        while self._text.startswith(",", position):
            position = _skip(self._text, position + 1)
        return position

    def _closes(self, position: int, closer: str) -> bool:
        if position >= len(self._text):
            self.reasons.append("a missing closing bracket")
            self.end = position
            return True
        if self._text[position] in ")]}":
            # A wrong bracket closes it too; one that belongs to an outer value is not consumed.
            self.end = position + (self._text[position] == closer)
            return True
        return False

    def _key(self, position: int) -> str:
        quote = self._quote_at(position)
        if quote and not _HALF_QUOTED_KEY.match(self._text, position + len(quote)):
            return self._string(position, quote)
        # A key that lacks one quote ends before its colon.
        found = _BARE_KEY.match(self._text, position + len(quote))
        if found is None:
            raise NotJsonError
        self.reasons.append("a key without quotes")
        self.end = found.end() + len(self._quote_at(found.end()))
        return json.dumps(found[0], ensure_ascii=False)

    def _quote_at(self, position: int) -> str:
        return next(filter(lambda quote: self._text.startswith(quote, position), self._quotes), "")

    def _string(self, position: int, quote: str) -> str:
        """Read a string: a quote ends it only if the text after it can follow a string."""
        begin = position + len(quote)
        end = self._text.find(quote, begin)
        while end >= 0 and not self._may_end(begin, end, quote):
            end = self._text.find(quote, end + 1)
        if end < 0:
            raise NotJsonError
        self.end = end + len(quote)
        if quote != '"':
            self.reasons.append(f"strings in {quote}")
        return self._as_json(self._text[begin:end])

    def _may_end(self, begin: int, end: int, quote: str) -> bool:
        slashes = end
        while slashes > begin and self._text[slashes - 1] == "\\":
            slashes -= 1
        if (end - slashes) % 2 == 1 and len(quote) == 1:
            return False
        follows = _skip(self._text, end + len(quote))
        return follows >= len(self._text) or self._text[follows] in _FOLLOWERS

    def _as_json(self, raw: str) -> str:
        """Return a string as JSON; valid JSON escapes are kept."""
        text = f'"{_ODD.sub(self._escaped, raw)}"'
        try:
            value = json.loads(text)
        except ValueError:
            return json_string(raw)
        return json_string(value) if SURROGATE.search(value) else text

    def _escaped(self, odd: re.Match[str]) -> str:
        """Return the JSON of an escape, or of a character that needs escaping."""
        found = odd[0]
        if found == "\\'":
            return "'"
        if found == '"':
            self.reasons.append("a quote inside a string")
        is_escape = len(found) > 1
        return found if is_escape else json.dumps(found)[1:-1]

    def _bare(self, position: int) -> str:
        """Read a number, a constant, or text without quotes."""
        found = _BARE.match(self._text, position)
        raw = found[0].rstrip() if found else ""
        if not raw:
            raise NotJsonError
        # A quote at its end belongs to a string that lacks the first one.
        quote = next((quote for quote in self._quotes if raw.endswith(quote)), "")
        self.end = position + len(raw)
        raw = raw.removesuffix(quote)
        if not quote and is_number(raw):
            return raw
        if not quote and raw.lower() in _CONSTANTS:
            if raw not in _CONSTANTS:
                self.reasons.append("a Python constant")
            return _CONSTANTS[raw.lower()]
        self.reasons.append("a string without quotes")
        return json.dumps(raw, ensure_ascii=False)
