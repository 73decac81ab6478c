"""Scans one JSON value in a stream, at a constant cost per character."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import TypeAlias

from backend.output.readers.patterns import fixed, span_end

SURROGATE = re.compile("[\ud800-\udfff\ufffd]")
"""Half a code point, which escapes may produce, or U+FFFD: neither may occur in sent text."""

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR_RUN = re.compile(r"[\w+.-]*", re.ASCII)
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_CONSTANT_START = frozenset("tfn")
_SCALAR_START = frozenset("-+.0123456789TFN") | _CONSTANT_START
# As Python and JavaScript write it.
_OTHER_NUMBER = re.compile(
    r"(?P<sign>[+-]?)(?:0[xX](?P<hex>[\da-fA-F]{1,16})"
    r"|(?P<whole>(?:0|[1-9](?:_?\d)*+)?)(?P<part>\.\d*)?(?P<power>[eE][+-]?\d+)?)",
    re.ASCII,
)
_PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_SIMPLE_ESCAPES = frozenset('"\\/bfnrt')
_HEX_DIGITS = 4
_HIGH = re.compile("[dD][89abAB]..")
_LOW = re.compile("[dD][c-fC-F]..")
_REPLACEMENT_DIGITS = "fffd"
_HEX = frozenset("0123456789abcdefABCDEF")
# Limits of the text held back at a possible end of a call inside a string.
_MAX_SPACE = 32
_MAX_MARKERS = 3
_CONTROL = {"\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}

_Step: TypeAlias = Callable[[str, int], tuple[str, int]]


def is_number(text: str) -> bool:
    """Tell whether a text is a number that fits a float."""
    is_written = text[:1] not in _CONSTANT_START and _SCALAR.fullmatch(text)
    return bool(is_written) and math.isfinite(float(text))


def json_number(text: str) -> str:
    """Return a number of Python or JavaScript as JSON; nothing if it is none."""
    if is_number(text):
        return text
    found = _OTHER_NUMBER.fullmatch(text)
    if found is None:
        return ""
    sign = found["sign"].strip("+")
    if found["hex"]:
        return f"{sign}{int(found['hex'], 16)}"
    whole, part = found["whole"].replace("_", ""), (found["part"] or "").rstrip(".")
    number = f"{sign}{whole or '0'}{part}{found['power'] or ''}"
    return number if (whole or part) and is_number(number) else ""


class JsonState(Enum):
    """The progress of a value."""

    OPEN = auto()
    COMPLETE = auto()
    MALFORMED = auto()


class _Place(Enum):
    """The positions outside strings and scalars."""

    VALUE = auto()
    FIRST_ITEM = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    AFTER_VALUE = auto()


@dataclass(frozen=True, slots=True)
class _CallEnds:
    """The ends of a call after its arguments: brackets, and the markers that end it.

    Attributes:
        plain: The text of a string up to a quote, an escape, or a possible end.
        begun: All beginnings of an end.
    """

    plain: re.Pattern[str]
    begun: re.Pattern[str]


@lru_cache
def call_ends(markers: tuple[str, ...]) -> _CallEnds:
    """Return the ends of calls with these markers."""
    first = "".join(sorted({re.escape(marker[0]) for marker in markers}))
    whole = "|".join(map(re.escape, markers)) or "(?!)"
    begun = "|".join(fixed(marker).begun for marker in markers) or "(?:)"
    return _CallEnds(
        plain=re.compile(rf'[^"\\\x00-\x1f\]}}{first}]*'),
        begun=re.compile(
            rf"(?:[\]}}][\]}}\s]{{0,{_MAX_SPACE}}})?"
            rf"(?:(?:{whole})\s{{0,{_MAX_SPACE}}}){{0,{_MAX_MARKERS}}}(?:{begun})"
        ),
    )


_IN_MEMBER = frozenset({_Place.FIRST_KEY, _Place.KEY, _Place.COLON})


class JsonScanner:
    """Consumes exactly one value, from its first character to its last.

    The output is a prefix of valid JSON, identical to the input except where JSON forbids it:
    control characters and lone backslashes in strings are escaped, a comma after the last item is
    dropped, constants and numbers of Python become JSON's, and half a surrogate pair becomes an
    escaped U+FFFD.

    Attributes:
        has_value: Whether a value inside it has begun, or the value is complete.
    """

    def __init__(self, ends: "_CallEnds | None" = None) -> None:
        """Begin before a value; `ends` inside a string are held back: a quote may be missing."""
        self.state = JsonState.OPEN
        self._ends = ends
        self._plain = ends.plain if ends else _PLAIN
        self._tail = ""
        self._pending = 0
        # A key and its raw length, up to the colon, which alone shows where a damaged key ends.
        self._key: list[str] = []
        self._key_chars = 0
        self._closers: list[str] = []
        self._place = _Place.VALUE
        self._step: _Step = self._in_structure
        self._scalar: list[str] = []
        # A comma and the whitespace after it, until another item follows.
        self._comma: list[str] = []
        self._late = ""
        self._late_chars = 0
        # The digits of an escape, and of the first half of a surrogate pair.
        self._digits = self._high = ""
        self.has_value = False

    @property
    def is_in_string(self) -> bool:
        """Whether a string is open."""
        outside = (self._in_structure, self._in_scalar)
        return self.state is JsonState.OPEN and self._step not in outside

    @property
    def pending(self) -> int:
        """Number of latest characters read but not emitted.

        Later text decides about them; those before malformed text are dropped.
        """
        return self._key_chars or self._pending

    def read_from(self, text: str, position: int = 0) -> tuple[str, int]:
        """Return text from a position as JSON, and the position where it or the value ends."""
        taken: list[str] = []
        while self.state is JsonState.OPEN and position < len(text):
            piece, end = self._step(text, position)
            taken.append(self._without_key(piece, end - position))
            position = end
        return "".join(taken), position

    def _without_key(self, piece: str, chars: int) -> str:
        """Hold back a piece of a key, of `chars` raw characters; return a complete key."""
        if self.state is JsonState.MALFORMED:
            return piece
        has_begun = self._place is _Place.COLON or self._step != self._in_structure
        if has_begun and self._place in _IN_MEMBER:
            self._key_chars += chars if self._key else len(piece)
            self._key.append(piece)
            return ""
        if self._key:
            piece = "".join((*self._key, piece))
            self._key.clear()
            self._key_chars = 0
        return piece

    def _in_structure(self, text: str, position: int) -> tuple[str, int]:
        """Consume whitespace, or one character outside strings and scalars."""
        end = span_end(_SPACE, text, position)
        if end > position:
            return self._spaced(text[position:end]), end
        char = text[position]
        if self._place in (_Place.VALUE, _Place.FIRST_ITEM) and char in _SCALAR_START:
            return self._begin_scalar(), position
        if not self._goes_on_with(char):
            return self._fail(position)
        late = self._released()
        if char == ",":
            return late + self._keep(char), position + 1
        if char in "]}":
            del self._comma[:1]
        return late + self._take_comma() + char, position + 1

    def _spaced(self, space: str) -> str:
        if self._late:
            return self._hold(space)
        return self._keep(space) if self._comma else space

    def _keep(self, text: str) -> str:
        self._comma.append(text)
        self._pending += len(text)
        return ""

    def _take_comma(self) -> str:
        comma, self._comma = "".join(self._comma), []
        self._pending = 0
        return comma

    def _begin_scalar(self) -> str:
        self._scalar = []
        self._step = self._in_scalar
        return self._take_comma()

    def _goes_on_with(self, char: str) -> bool:
        """Follow a structural character, or tell that it is not allowed here."""
        match self._place, char:
            case ((_Place.VALUE | _Place.FIRST_ITEM), "{"):
                self.has_value |= bool(self._closers)
                self._closers.append("}")
                self._place = _Place.FIRST_KEY
            case ((_Place.VALUE | _Place.FIRST_ITEM), "["):
                self.has_value |= bool(self._closers)
                self._closers.append("]")
                self._place = _Place.FIRST_ITEM
            case ((_Place.VALUE | _Place.FIRST_ITEM | _Place.FIRST_KEY | _Place.KEY), '"'):
                self.has_value |= self._place is _Place.VALUE
                self._step = self._in_string
            case _Place.COLON, ":":
                self._place = _Place.VALUE
            case _Place.AFTER_VALUE, ",":
                self._place = _Place.KEY if self._closers[-1] == "}" else _Place.VALUE
            case ((_Place.AFTER_VALUE | _Place.FIRST_ITEM), "]"):
                return self._closes_with(char)
            case ((_Place.AFTER_VALUE | _Place.FIRST_KEY | _Place.KEY), "}"):
                return self._closes_with(char)
            case _Place.VALUE, "]" if self._comma:
                return self._closes_with(char)
            case _:
                return False
        return True

    def _closes_with(self, char: str) -> bool:
        if self._closers.pop() != char:
            return False
        self._end_value()
        return True

    def _end_value(self) -> None:
        self.has_value = True
        self._step = self._in_structure
        self._place = _Place.AFTER_VALUE
        if not self._closers:
            self.state = JsonState.COMPLETE

    def _hold(self, text: str) -> str:
        """Hold back the end of a string until the following text confirms it."""
        self._late += text
        self._late_chars += len(text)
        self._pending += len(text)
        return ""

    def _released(self) -> str:
        late, self._late = self._late, ""
        self._pending -= self._late_chars
        self._late_chars = 0
        return late

    def _end_string(self) -> None:
        if self._place in (_Place.FIRST_KEY, _Place.KEY):
            self._step = self._in_structure
            self._place = _Place.COLON
        else:
            self._end_value()

    def _in_string(self, text: str, position: int) -> tuple[str, int]:
        end = span_end(self._plain, text, position)
        if end > position:
            return text[position:end], end
        char = text[position]
        if self._ends and self._ends.begun.fullmatch(char):
            if self._place not in _IN_MEMBER:
                self._step = self._in_tail
                return "", position
        elif char == '"':
            self._end_string()
            if self._closers:
                return self._hold(char), position + 1
        elif char == "\\":
            self._step = self._in_escape
            self._pending = 1
            return "", position + 1
        else:
            char = _CONTROL.get(char, f"\\u{ord(char):04x}")
        return char, position + 1

    def _in_tail(self, text: str, position: int) -> tuple[str, int]:
        """Hold back a possible end of the call, until other text follows."""
        tail = self._tail + text[position]
        if self._ends and self._ends.begun.fullmatch(tail):
            self._tail = tail
            self._pending = len(tail)
            return "", position + 1
        first, rest = self._tail[0], self._tail[1:]
        self._tail = ""
        self._pending = 0
        self._step = self._in_string
        pieces = [first]
        start = 0
        while start < len(rest):
            piece, start = self._step(rest, start)
            pieces.append(piece)
        return "".join(pieces), position

    def _in_escape(self, text: str, position: int) -> tuple[str, int]:
        """Read the character after a backslash, which JSON needs before no single quote."""
        char = text[position]
        if char == "u":
            self._pending = 1
            self._step = self._in_code_point
            return "\\", position + 1
        self._pending = 0
        self._step = self._in_string
        if char == "'":
            return char, position + 1
        return (f"\\{char}", position + 1) if char in _SIMPLE_ESCAPES else ("\\\\", position)

    def _in_code_point(self, text: str, position: int) -> tuple[str, int]:
        """Hold back the digits of a code point, up to the end of a surrogate pair."""
        char = text[position]
        if char not in _HEX:
            return self._half_escape(), position
        self._digits += char
        self._pending += 1
        if len(self._digits) < _HEX_DIGITS:
            return "", position + 1
        digits, self._digits = self._digits, ""
        is_low = _LOW.fullmatch(digits) is not None
        if self._high and is_low:
            return self._end_code_point(f"u{self._high}\\u{digits}"), position + 1
        before = f"u{_REPLACEMENT_DIGITS}\\" if self._high else ""
        if _HIGH.fullmatch(digits):
            self._high = digits
            self._pending = 1 + _HEX_DIGITS
            self._step = self._after_high
            return before, position + 1
        digits = _REPLACEMENT_DIGITS if is_low else digits
        return before + self._end_code_point(f"u{digits}"), position + 1

    def _half_escape(self) -> str:
        """Return the text of an escape that lacks digits: its backslash is doubled."""
        before = f"u{_REPLACEMENT_DIGITS}\\" if self._high else ""
        digits, self._digits = self._digits, ""
        return before + self._end_code_point(f"\\u{digits}")

    def _end_code_point(self, piece: str) -> str:
        self._high = ""
        self._pending = 0
        self._step = self._in_string
        return piece

    def _after_high(self, text: str, position: int) -> tuple[str, int]:
        """Look for a backslash after the first half of a surrogate pair."""
        if text[position] != "\\":
            return self._end_code_point(f"u{_REPLACEMENT_DIGITS}"), position
        self._pending += 1
        self._step = self._in_escape_after_high
        return "", position + 1

    def _in_escape_after_high(self, text: str, position: int) -> tuple[str, int]:
        if text[position] == "u":
            self._pending += 1
            self._step = self._in_code_point
            return "", position + 1
        piece = self._end_code_point(f"u{_REPLACEMENT_DIGITS}")
        self._step = self._in_escape
        self._pending = 1
        return piece, position

    def _in_scalar(self, text: str, position: int) -> tuple[str, int]:
        """Hold back a number or a constant until it ends: an operator may follow it."""
        end = span_end(_SCALAR_RUN, text, position)
        if end > position:
            self._scalar.append(text[position:end])
            self._pending += end - position
            return "", end
        written = "".join(self._scalar)
        is_constant = written[:1] in _CONSTANT_START and _SCALAR.fullmatch(written)
        constant = written if is_constant else _PYTHON_CONSTANTS.get(written, "")
        scalar = constant or json_number(written)
        if not scalar:
            return self._fail(position)
        self._end_value()
        if self._closers:
            self._late, self._late_chars = scalar, self._pending
            return "", position
        self._pending = 0
        return scalar, position

    def _fail(self, position: int) -> tuple[str, int]:
        self.state = JsonState.MALFORMED
        return "", position


class JsonStrings:
    """Follows an object or array, and remembers the first place in a string where a tag begins.

    If the value turns out not to be JSON, a quote may be missing, and it may have ended there.

    Attributes:
        read: Number of characters read but not taken.
    """

    def __init__(self) -> None:
        self._scanner = JsonScanner()
        self._first = ""
        self.read = 0
        self._first_tag: int | None = None

    @property
    def sure(self) -> int:
        """Number of characters read but not taken that belong to the value for certain."""
        return self.read if self._first_tag is None else self._first_tag

    @property
    def is_broken(self) -> bool:
        """Whether the value is not an object or array in JSON."""
        return self._first not in ("", "{", "[") or self._scanner.state is JsonState.MALFORMED

    def quotes(self, text: str) -> bool:
        """Read more of the value; return whether a tag after it is in a string."""
        self._first = self._first or text.lstrip()[:1]
        self._scanner.read_from(text)
        self.read += len(text)
        is_quoted = self._scanner.is_in_string and not self.is_broken
        if is_quoted and self._first_tag is None:
            self._first_tag = self.read
        return is_quoted

    def read_on(self, text: str) -> None:
        """Read more of the value, up to where no tag begins."""
        first_tag = self._first_tag
        self.quotes(text)
        self._first_tag = first_tag

    def take(self, chars: int) -> None:
        """Count characters as taken."""
        self.read -= chars
        if self._first_tag is not None:
            self._first_tag -= chars
