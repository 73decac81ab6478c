"""Reads the lexical elements of GBNF: space, comments, names, numbers, escapes.

The dialect is that of llama.cpp's `src/llama-grammar.cpp`.
"""

import re

from backend.errors import GrammarSyntaxError
from backend.sampling.grammar.charset import MAX_CODE_POINT

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_LINE_BREAK = re.compile(r"\r\n|\r|\n")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_DIGITS = re.compile(r"[0-9]+")
_PLAIN_TEXT = re.compile(r'[^"\\]*')
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n"} | {c: c for c in '\\"[]-'}


class Cursor:
    """A reading position in a text.

    Attributes:
        at: Offset of the next character.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def error(self, problem: str, at: int | None = None) -> GrammarSyntaxError:
        """Return an error for the character at `at`, or for the next one."""
        before = self.text[: self.at if at is None else at]
        breaks = list(_LINE_BREAK.finditer(before))
        line_start = breaks[-1].end() if breaks else 0
        return GrammarSyntaxError(len(breaks) + 1, len(before) - line_start + 1, problem)

    @property
    def next(self) -> str:
        """The next character; empty at the end."""
        return self.text[self.at : self.at + 1]

    def take(self, expected: str) -> bool:
        """Move past `expected` if it comes next; return whether it did."""
        found = self.text.startswith(expected, self.at)
        self.at += len(expected) if found else 0
        return found

    def require(self, expected: str) -> None:
        """Move past `expected`, which must come next."""
        if not self.take(expected):
            found = repr(self.next) if self.next else "the end"
            raise self.error(f"expected {expected!r}, found {found}")

    def skip_space(self, *, newlines: bool) -> None:
        """Move past blanks and comments, and past line breaks if `newlines` is set."""
        pattern = _SPACE_AND_LINES if newlines else _SPACE
        self._match(pattern)

    def starts_name(self) -> bool:
        """Whether a rule's name comes next."""
        return _NAME.match(self.text, self.at) is not None

    def name(self) -> str:
        """Read a rule's name."""
        return self._match(_NAME) or self._fail("expected the name of a rule")

    def integer(self) -> int:
        """Read a decimal number."""
        digits = self._match(_DIGITS) or self._fail("expected a number")
        # Longer numbers exceed every limit, and Python refuses very long ones.
        return int(digits.lstrip("0")[:20] or "0")

    def plain_text(self) -> str:
        """Read the characters of a literal up to an escape or the end."""
        return self._match(_PLAIN_TEXT)

    def character(self) -> int:
        r"""Read a character of a literal or a class; return its code point.

        A code point written as `\u` may be a surrogate, which never occurs in text.
        """
        if not self.next:
            self._fail("the grammar ends too early")
        if self.take("\\"):
            return self._escaped()
        self.at += 1
        return ord(self.text[self.at - 1])

    def _escaped(self) -> int:
        start, kind = self.at - 1, self.next
        self.at += 1
        if kind in _ESCAPES:
            return ord(_ESCAPES[kind])
        if kind not in _HEX_DIGITS:
            raise self.error(f"unknown escape {self.text[start : self.at]!r}", start)
        count = _HEX_DIGITS[kind]
        digits = re.compile(f"[0-9A-Fa-f]{{{count}}}").match(self.text, self.at)
        if digits is None:
            raise self.error(f"\\{kind} takes {count} hexadecimal digits", start)
        self.at = digits.end()
        value = int(digits.group(), 16)
        if value > MAX_CODE_POINT:
            raise self.error("there is no such character", start)
        return value

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        text = found.group() if found else ""
        self.at += len(text)
        return text

    def _fail(self, problem: str) -> str:
        raise self.error(problem)
