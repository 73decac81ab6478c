"""JSON as models write it when they drift, to JSON."""

import json
import re
from dataclasses import dataclass

_SPACE = re.compile(r"\s*")
_BARE = re.compile(r"[^,{}\[\]()\n]+")
_BARE_KEY = re.compile(r"[^\s:=,{}\[\]()\"']+")
_ASSIGN = re.compile(r"\s*(?:=>|:|=)\s*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_ESCAPES = frozenset('"\\/bfnrtu')
_FOLLOWERS = frozenset(",:=}])")
_MAX_DEPTH = 64


class NotJsonError(ValueError):
    """The text cannot be taken for JSON."""


@dataclass(frozen=True, slots=True)
class Repaired:
    """A value that was read.

    Attributes:
        text: It as JSON.
        end: The position after it.
        reasons: The repairs that were needed, each once.
    """

    text: str
    end: int
    reasons: tuple[str, ...]


def read_json(text: str, position: int, quotes: tuple[str, ...] = ('"', "'")) -> Repaired:
    """Read a value that begins at a position.

    Read as well: keys and texts without quotes or in other quotes, quotes inside of texts,
    constants of Python, missing and superfluous commas, `=` for a colon, and closing brackets
    that are missing at the end of the text.

    Args:
        text: A text that ends with the call.
        position: Where the value begins, whitespace aside.
        quotes: The texts around strings, longer ones first.

    Raises:
        NotJsonError: There is no value, or it ends inside of a string.
    """
    reader = _Reader(text, quotes)
    value = reader.value(_skip(text, position), 0)
    return Repaired(value, reader.end, tuple(dict.fromkeys(reader.reasons)))


def _skip(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position


class _Reader:
    """Reads one value; `end` is the position after what was read last."""

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
        """Read the members of an object, up to its closer."""
        found: list[str] = []
        while not self._closes(position := self._next(position), closer):
            key = self._key(position)
            assign = _ASSIGN.match(self._text, self.end)
            if assign is None:
                raise NotJsonError
            if ":" not in assign[0]:
                self.reasons.append("an equals sign for a colon")
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
        """Return the position of the next member, behind commas."""
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
            # A wrong bracket closes, too; one that belongs to the outside is left there.
            self.end = position + (self._text[position] == closer)
            return True
        return False

    def _key(self, position: int) -> str:
        if quote := self._quote_at(position):
            return self._string(position, quote)
        found = _BARE_KEY.match(self._text, position)
        if found is None:
            raise NotJsonError
        self.reasons.append("a key without quotes")
        self.end = found.end()
        return json.dumps(found[0], ensure_ascii=False)

    def _quote_at(self, position: int) -> str:
        return next(filter(lambda quote: self._text.startswith(quote, position), self._quotes), "")

    def _string(self, position: int, quote: str) -> str:
        """Read a string: a quote ends it only where something follows that can follow one."""
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
        inside = self._text[begin:end]
        is_escaped = (len(inside) - len(inside.rstrip("\\"))) % 2 == 1
        if is_escaped and len(quote) == 1:
            return False
        follows = _skip(self._text, end + len(quote))
        return follows >= len(self._text) or self._text[follows] in _FOLLOWERS

    def _as_json(self, raw: str) -> str:
        """Return the text of a string as JSON; escapes that JSON knows are kept."""
        pieces: list[str] = []
        chars = iter(range(len(raw)))
        for place in chars:
            char = raw[place]
            if char == "\\" and raw[place + 1 : place + 2] in _ESCAPES and place + 1 < len(raw):
                pieces.append(raw[place : place + 2])
                next(chars, None)
            elif char == "\\" and raw[place + 1 : place + 2] == "'":
                continue
            else:
                if char == '"':
                    self.reasons.append("a quote inside of a string")
                pieces.append(json.dumps(char, ensure_ascii=False)[1:-1])
        text = f'"{"".join(pieces)}"'
        try:
            json.loads(text)
        except ValueError:
            return json.dumps(raw, ensure_ascii=False)
        return text

    def _bare(self, position: int) -> str:
        """Read a number, a constant, or a text without quotes."""
        found = _BARE.match(self._text, position)
        raw = found[0].rstrip() if found else ""
        if not raw:
            raise NotJsonError
        # A last quote belongs to a string whose first one is missing.
        quote = next((quote for quote in self._quotes if raw.endswith(quote)), "")
        self.end = position + len(raw)
        raw = raw.removesuffix(quote)
        if not quote and _NUMBER.fullmatch(raw):
            return raw
        if not quote and raw.lower() in _CONSTANTS:
            if raw not in _CONSTANTS:
                self.reasons.append("a constant of Python")
            return _CONSTANTS[raw.lower()]
        self.reasons.append("a string without quotes")
        return json.dumps(raw, ensure_ascii=False)


def closed_json(begun: str) -> str:
    """Return the beginning of an object with its ends, so that it is valid JSON."""
    closers: list[str] = []
    is_string = is_escaped = False
    for char in begun:
        if is_string:
            is_string = is_escaped or char != '"'
            is_escaped = char == "\\" and not is_escaped
        elif char == '"':
            is_string = True
        elif char in _CLOSERS:
            closers.append(_CLOSERS[char])
        elif char in "}]":
            closers.pop()
    end = "".join(reversed(closers))
    quote = '"' if is_string else ""
    for filler in ("", "null", ": null", '"": null', "0", "rue", "alse", "ull"):
        text = f"{begun}{quote}{filler}{end}"
        try:
            json.loads(text)
        except ValueError:
            continue
        return text
    return f"{begun}{{}}" if not begun.strip() else begun
