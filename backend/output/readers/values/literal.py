"""Converts one value in program syntax to JSON, incrementally.

Strings are in quotes, and everything else is recognised by its form. Quotes inside strings may
be unescaped: templates show models strings as they are, between quotes. So a quote ends a
string only if the text after it can follow a string.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from backend.output.readers.markup import REFUTED, UNDECIDED, after, after_space, span_end
from backend.output.readers.reader import NotACallError
from backend.output.readers.values.python_escape import read_escape
from backend.output.readers.values.schema import NOT_A_STRING, STRING, UNKNOWN, JsonTypes
from backend.output.readers.values.typed_value import ValueWriter, json_string, json_value

MAX_QUOTED_CHARS = 4096
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"\w")
_NULLS = ("null", "none")
_LETTERS = re.compile(r"[rRbBfFuU]{0,2}")
_PREFIX = re.compile(r"""(?:[rR][bBfF]?|[bBfF][rR]?|[uU])(?=["'])""")
_LITERAL = r"""[rRbBfFuU]{0,2}(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
_CONCATENATED = re.compile(rf"\s+(?P<next>{_LITERAL})(?:\s+{_LITERAL})*\s*[,)\]}}]")
_BEGUN_CONCATENATION = re.compile(
    rf"""\s*(?:(?<=\s){_LITERAL}\s*)*(?:[rRbBfFuU]{{0,2}}(?:"(?:[^"\\\n]|\\.)*|'(?:[^'\\\n]|\\.)*)?\\?)?"""
)
_JSON_BRACKETS = {"{": "{", "}": "}", "[": "[", "]": "]", "(": "[", ")": "]"}

_Step: TypeAlias = Callable[[str, int], tuple[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralSyntax:
    """The syntax of values.

    Attributes:
        quotes: Texts around a string; a text that is a prefix of another comes after it.
        plain: The text of a string up to a quote or an escape.
        bare: A value without quotes: a number, a constant, or a string that lacks them.
        bare_key: A key without quotes.
        brackets: Opening brackets of nested values, each with its closing one.
        has_escapes: Whether strings have Python's backslash escapes, prefixes and concatenation.
        format_plain: As `plain`, for a string whose braces are doubled.
    """

    quotes: tuple[str, ...]
    plain: re.Pattern[str]
    bare: re.Pattern[str]
    bare_key: re.Pattern[str]
    brackets: Mapping[str, str]
    has_escapes: bool
    format_plain: re.Pattern[str]


class LiteralValue:
    """Consumes exactly one value."""

    def __init__(
        self, syntax: LiteralSyntax, types: JsonTypes, ends_at: Callable[[int], int]
    ) -> None:
        """Begin before a value.

        Args:
            syntax: Its syntax.
            types: Types allowed by the schema. If the value's form is of another type, it is
                converted if possible.
            ends_at: Tells whether a top-level string may end at a position of the text: returns a
                position, or a negative number as in `markup`.
        """
        self._syntax = syntax
        self._types = types
        self._ends_at = ends_at
        self._step: _Step = self._at_item
        self._closers: list[str] = []
        self._json_ends: list[str] = []
        self._is_first = True
        self._is_key = False
        # JSON since a brace that opens a set if no colon follows its first item.
        self._doubt: list[str] | None = None
        self._bare_first = ""
        self._quote = ""
        self._is_raw = self._is_format = False
        self._last = ""
        self._writer = ValueWriter(STRING)
        self._bare: list[str] = []
        self.is_complete = False

    def feed(self, text: str, position: int) -> tuple[str, int]:
        """Take a step: return JSON that is certain, and the position after the consumed text.

        The position is negative if more text is needed.

        Raises:
            NotACallError: There is no value.
        """
        piece, end = self._step(text, position)
        if self._doubt is None:
            return piece, end
        self._doubt.append(piece)
        return "", end

    def _at_item(self, text: str, position: int) -> tuple[str, int]:
        """Begin a value or a key, or close the brackets around it."""
        end = span_end(_SPACE, text, position)
        if end > position:
            return "", end
        if position == len(text):
            return "", UNDECIDED
        char = text[position]
        if self._closers and char == self._closers[-1]:
            return self._close(position)
        if char in self._syntax.brackets and (not self._is_key or self._is_first):
            lead = self._settle("]") if self._is_key else ""
            piece, end = self._open(char, position)
            return lead + piece, end
        return self._begin_string_or_bare(text, position)

    def _begin_string_or_bare(self, text: str, position: int) -> tuple[str, int]:
        start = self._prefix_end(text, position)
        quote, end = self._quote_at(text, start) if start >= 0 else ("", start)
        if end == UNDECIDED:
            return "", end
        if end == REFUTED:
            self._step = self._in_bare
            return self._separator(), position
        self._quote = quote
        self._bare_first = ""
        self._last = ""
        is_typed = not self._closers and self._types and "string" not in self._types
        self._writer = ValueWriter(self._types if is_typed else STRING)
        self._step = self._in_string
        return self._separator(), end

    def _quote_at(self, text: str, position: int) -> tuple[str, int]:
        """Return the quote at a position, and the position after it."""
        for quote in self._syntax.quotes:
            end = after(text, position, quote)
            if end != REFUTED:
                return quote, end
        return "", REFUTED

    def _prefix_end(self, text: str, position: int) -> int:
        """Return the position after the letters before a quote, and note their meaning."""
        self._is_raw = self._is_format = False
        if not self._syntax.has_escapes:
            return position
        letters = span_end(_LETTERS, text, position)
        if letters == len(text) and letters > position:
            return UNDECIDED
        found = _PREFIX.match(text, position)
        if found:
            self._is_raw = "r" in found[0].lower()
            self._is_format = "f" in found[0].lower()
        return found.end() if found else position

    def _separator(self) -> str:
        """Return the comma before an item, if it needs one."""
        comma = ", " if self._closers and not self._is_first else ""
        self._is_first = False
        return comma

    def _open(self, bracket: str, position: int) -> tuple[str, int]:
        piece = self._separator() + _JSON_BRACKETS[bracket]
        self._closers.append(self._syntax.brackets[bracket])
        self._json_ends.append(_JSON_BRACKETS[self._closers[-1]])
        self._is_first = True
        self._is_key = bracket == "{"
        self._step = self._at_item
        if self._is_key:
            self._doubt = []
        return piece, position + 1

    def _settle(self, json_end: str) -> str:
        """Return the JSON of a brace and its first item, now that their meaning is known."""
        pieces, self._doubt = self._doubt, None
        if pieces is None:
            return ""
        self._json_ends[-1] = json_end
        self._is_key = json_end == "}"
        text = "".join(pieces)
        if self._is_key:
            return text
        brace = text.index("{")
        item = text[brace + 1 :]
        if self._bare_first:
            item = self._bare_value(self._bare_first)
        return f"{text[:brace]}[{item}"

    def _close(self, position: int) -> tuple[str, int]:
        lead = self._settle("}")
        self._closers.pop()
        self._is_first = False
        self._is_key = False
        self._end_value()
        return lead + self._json_ends.pop(), position + 1

    def _end_value(self) -> None:
        self._step = self._after_item
        self.is_complete = not self._closers

    def _after_item(self, text: str, position: int) -> tuple[str, int]:
        """Consume the text between two items, or between a key and its value."""
        end = span_end(_SPACE, text, position)
        if end > position:
            return "", end
        if position == len(text):
            return "", UNDECIDED
        char = text[position]
        if self._is_key and char == ":":
            lead = self._settle("}")
            self._is_key = False
            self._is_first = True
            self._step = self._at_value
            return f"{lead}: ", position + 1
        lead = self._settle("]") if char in (",", self._closers[-1]) else ""
        if not self._is_key and char == ",":
            self._is_key = self._json_ends[-1] == "}"
            self._step = self._at_item
            return lead, position + 1
        if not self._is_key and char == self._closers[-1]:
            piece, end = self._close(position)
            return lead + piece, end
        raise NotACallError(position)

    def _at_value(self, text: str, position: int) -> tuple[str, int]:
        """Begin the value after a key, which must be present."""
        if position < len(text) and text[position] == self._closers[-1]:
            raise NotACallError(position)
        return self._at_item(text, position)

    def _in_string(self, text: str, position: int) -> tuple[str, int]:
        plain = self._syntax.format_plain if self._is_format else self._syntax.plain
        end = span_end(plain, text, position)
        if end > position:
            return self._text(text[position:end]), end
        if position == len(text):
            return "", UNDECIDED
        if self._is_special(text[position]):
            meaning, end = self._special_at(text, position)
            return self._text(meaning) if end >= 0 else "", end
        end = self._string_end_at(text, position)
        if end == REFUTED:
            return self._refuted_end(text, position)
        if end < 0:
            return "", end
        piece = self._writer.finish()
        self._end_value()
        return piece, end

    def _refuted_end(self, text: str, position: int) -> tuple[str, int]:
        """Go on after a quote that does not end the string."""
        end = self._concatenated_at(text, position)
        return self._doubtful_quote(text, position) if end == REFUTED else ("", end)

    def _is_special(self, char: str) -> bool:
        return (self._has_escapes and char == "\\") or (self._is_format and char in "{}")

    def _special_at(self, text: str, position: int) -> tuple[str, int]:
        """Return the text of an escape or of a doubled brace, and the position after it."""
        char = text[position]
        if char != "\\":
            end = after(text, position, char * 2)
            return ("", end) if end == UNDECIDED else (char, max(end, position + 1))
        if not self._is_raw:
            return read_escape(text, position)
        end = position + 2
        return (text[position:end], end) if end <= len(text) else ("", UNDECIDED)

    def _concatenated_at(self, text: str, position: int) -> int:
        """Go on with a string literal after the quote here, if one follows: both are one string."""
        start = after(text, position, self._quote) if self._syntax.has_escapes else REFUTED
        if start < 0:
            return start
        limit = start + MAX_QUOTED_CHARS
        found = _CONCATENATED.match(text, start, limit)
        if found is None:
            is_open = len(text) < limit and _BEGUN_CONCATENATION.fullmatch(text, start)
            return UNDECIDED if is_open else REFUTED
        begin = self._prefix_end(text, found.start("next"))
        self._quote, end = self._quote_at(text, begin)
        return end

    def _doubtful_quote(self, text: str, position: int) -> tuple[str, int]:
        """Treat a character that may begin a quote as text; skip a doubled opening quote."""
        end = after(text, position, self._quote)
        if not self._is_token or end < 0:
            return self._text(text[position]), position + 1
        if not self._last:
            return "", end
        partner = self._partner_of(text, end)
        if partner == UNDECIDED:
            return "", partner
        if partner == REFUTED:
            return self._text(self._quote), end
        return self._text(f'"{text[end:partner]}"'), partner + len(self._quote)

    def _partner_of(self, text: str, start: int) -> int:
        """Return the position of the token that quotes something with the one before `start`.

        Models write the token where they mean a quotation mark: before a word, and after it.
        """
        if start == len(text):
            return UNDECIDED
        if _WORD.match(self._last) or text[start].isspace():
            return REFUTED
        limit = start + MAX_QUOTED_CHARS
        partner = text.find(self._quote, start, limit)
        end = partner + len(self._quote)
        if partner < 0 or end == len(text):
            return UNDECIDED if len(text) < limit else REFUTED
        is_end = self._string_end_at(text, partner)
        if is_end == UNDECIDED:
            return UNDECIDED
        is_inside = _WORD.match(text, end) or text[partner - 1].isspace()
        return REFUTED if is_end >= 0 or is_inside else partner

    def _text(self, text: str) -> str:
        self._last = text[-1:] or self._last
        return self._writer.feed(text)

    @property
    def _is_token(self) -> bool:
        """Whether the quote is a special token, which never occurs in text."""
        return self._quote.startswith("<")

    @property
    def _has_escapes(self) -> bool:
        """Whether backslashes count: models that fall back to JSON's quotes use its escapes."""
        return self._syntax.has_escapes or self._quote != self._syntax.quotes[0]

    def _string_end_at(self, text: str, position: int) -> int:
        """Return the position after the quote here, if it ends the string."""
        end = after(text, position, self._quote)
        if end < 0:
            return end
        again = after(text, end, self._quote) if self._is_token else REFUTED
        if again == UNDECIDED and end < len(text):
            return UNDECIDED
        end = max(end, again)
        follows = self._follows_at(text, end) if self._closers else self._ends_at(end)
        return end if follows >= 0 else follows

    def _follows_at(self, text: str, position: int) -> int:
        """Match text that may follow a string inside brackets."""
        position = after_space(text, position)
        if position < 0:
            return position
        followers = f",{self._closers[-1]}"
        if self._is_key:
            followers = ":" if self._doubt is None else f":{followers}"
        return position if text[position] in followers else REFUTED

    def _in_bare(self, text: str, position: int) -> tuple[str, int]:
        """Collect a value without quotes; its type is known at its end."""
        pattern = self._syntax.bare_key if self._is_key else self._syntax.bare
        end = span_end(pattern, text, position)
        self._bare.append(text[position:end])
        if end == len(text):
            return "", end if end > position else UNDECIDED
        raw = "".join(self._bare).strip()
        self._bare = []
        # A quote at its end belongs to a string that lacks the first one.
        quote = next(filter(raw.endswith, self._syntax.quotes), "")
        if not raw.removesuffix(quote):
            raise NotACallError(position)
        is_text = self._is_key or bool(quote)
        raw = raw.removesuffix(quote)
        self._bare_first = "" if quote else raw
        piece = json_string(raw) if is_text else self._bare_value(raw)
        self._end_value()
        return piece, end

    def _bare_value(self, raw: str) -> str:
        types = UNKNOWN if self._closers else self._types
        is_text = types == STRING and raw.lower() not in _NULLS
        return json_value(raw, STRING if is_text else NOT_A_STRING)
