"""Reads a value in the syntax of a programming language."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from backend.output.readers.patterns import (
    REFUTED,
    SPACE_IN_LINE,
    UNDECIDED,
    Piece,
    after,
    after_space,
    any_of,
    choice,
    fixed,
    sequence,
    span_end,
)
from backend.output.readers.reader import MAX_NAME_CHARS, NotACallError
from backend.output.readers.typed_values import (
    NOT_A_STRING,
    SCALARS,
    STRING,
    UNKNOWN,
    JsonTypes,
    ValueWriter,
    json_string,
    json_value,
)

_SIMPLE = dict(zip("\\'\"abfnrtv", "\\'\"\a\b\f\n\r\t\v", strict=True)) | {"\n": ""}
_HEX = "[0-9a-fA-F]"
_HEX_DIGITS = {
    "x": re.compile(rf"{_HEX}{{2}}"),
    "u": re.compile(rf"{_HEX}{{4}}"),
    "U": re.compile(rf"{_HEX}{{8}}"),
}
_OCTAL_DIGITS = re.compile("[0-7]{1,3}")
_UNFINISHED = re.compile(rf"\\(?:[0-7]{{0,2}}|x{_HEX}?|u{_HEX}{{0,3}}|U{_HEX}{{0,7}})\Z")
_CODE_POINTS = 0x110000
_HIGH = range(0xD800, 0xDC00)
_LOW = re.compile(rf"\\u([dD][c-fC-F]{_HEX}{{2}})")
_BEGUN_LOW = re.compile(rf"\\?\Z|\\u(?:[dD](?:[c-fC-F]{_HEX}?)?)?\Z")
_BEYOND = 0x10000


def read_escape(text: str, position: int) -> tuple[str, int]:
    """Return the character escaped at a position, and the position after it.

    The position is negative if more text is needed. A backslash that escapes nothing is a
    backslash, as in Python. A surrogate pair is one character, as in JSON.
    """
    if _UNFINISHED.match(text, position):
        return "", UNDECIDED
    kind = text[position + 1]
    if kind in _SIMPLE:
        return _SIMPLE[kind], position + 2
    is_hex = kind in _HEX_DIGITS
    digits = _HEX_DIGITS.get(kind, _OCTAL_DIGITS).match(text, position + 1 + is_hex)
    if digits is None or (code_point := int(digits[0], 16 if is_hex else 8)) >= _CODE_POINTS:
        return "\\", position + 1
    if is_hex and code_point in _HIGH:
        return _pair_or_half(text, code_point, digits.end())
    return chr(code_point), digits.end()


def _pair_or_half(text: str, high: int, end: int) -> tuple[str, int]:
    """Return the character of a surrogate pair, or its first half if the second is missing."""
    if low := _LOW.match(text, end):
        return chr(_BEYOND + ((high - _HIGH[0]) << 10) + int(low[1], 16) - _HIGH.stop), low.end()
    return ("", UNDECIDED) if _BEGUN_LOW.match(text, end) else (chr(high), end)


MAX_QUOTED_CHARS = 4096
_MAX_TAIL_CHARS = 400
# So many quotes in a row are those of a text in Python.
_LONG_QUOTE = 3
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"\w")
_NULLS = ("null", "none")
_INNER_NAME = re.compile(r"[^\W\d][\w.:-]*")
_INNER_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_LETTERS = re.compile(r"[rRbBfFuU]{0,2}")
_PREFIX = re.compile(r"""(?:[rR][bBfF]?|[bBfF][rR]?|[uU])(?=["'])""")
_LITERAL = r"""[rRbBfFuU]{0,2}(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
_JOIN = r"(?:\s*+\+\s*+|\s++)"
_CONCATENATED = re.compile(rf"{_JOIN}(?P<next>{_LITERAL})(?:{_JOIN}{_LITERAL})*\s*[,)\]}}]")
_BEGUN_LITERAL = r"""[rRbBfFuU]{0,2}(?:"(?:[^"\\\n]|\\.)*|'(?:[^'\\\n]|\\.)*)?\\?"""
_BEGUN_CONCATENATION = re.compile(rf"(?:{_JOIN}{_LITERAL})*(?:{_JOIN}(?:{_BEGUN_LITERAL})?)?")
_NUMBER = re.compile(r"[+-]?\.?\d")
# An operator in an expression of numbers.
_OPERATOR = re.compile(r"[^\S\n]*+[-+*/%]++[^\S\n]*+(?=[\d.])")
_BEGUN_OPERATOR = re.compile(r"[^\S\n]*+[-+*/%]*+[^\S\n]*+")
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
        has_bare_text: Whether a text may lack its quotes.
        call_begin: The text that begins every call, if any.
        inner_call: A call that has begun and not ended, inside a text.
        block_end: The text that ends it, with its block.
    """

    quotes: tuple[str, ...]
    plain: re.Pattern[str]
    bare: re.Pattern[str]
    bare_key: re.Pattern[str]
    brackets: Mapping[str, str]
    has_escapes: bool
    format_plain: re.Pattern[str]
    has_bare_text: bool = False
    call_begin: str = ""
    inner_call: re.Pattern[str] | None = None
    block_end: str = ""


def _space_at(text: str, position: int) -> tuple[str, int] | None:
    """Return the step over space, or that more text is needed; `None` before a character."""
    end = span_end(_SPACE, text, position)
    if end > position:
        return "", end
    return ("", UNDECIDED) if position == len(text) else None


# Signs of a text without quotes, such as an address, and a word after it: no key, no operator.
_SIGN = re.compile(r"""[^\s,()\[\]{}'"]|(?<=\w)'(?=\w)""")
_NEXT_WORD = re.compile(
    r"""[^\S\n]+(?:(?![-+*/%]\s)[^\s,()\[\]{}='"#]+(?P<after>[^\S\n]*+[^\s]|\n)?)?"""
)
# Perhaps the next argument.
_BEFORE_NEXT = re.compile(r",|[^\S\n]+[^\W\d]\w*+[^\S\n]*+=")
# A part of it in brackets or, after a space or a sign, in quotes.
_AFTER_SIGN = Piece(r"(?<=[\s=:+])", "")
_PART = sequence(
    SPACE_IN_LINE,
    choice(
        *(
            sequence(fixed(begin), any_of(rf"[^\{begin}\{end}\n]", least=0), fixed(end))
            for begin, end in ("()", "[]", "{}")
        ),
        *(
            sequence(_AFTER_SIGN, fixed(quote), any_of(rf"[^{quote}\n]", least=0), fixed(quote))
            for quote in "\"'"
        ),
    ),
)
_WHOLE_PART, _BEGUN_PART = re.compile(_PART.whole), re.compile(_PART.begun)


def _part_end(text: str, position: int) -> int:
    """Return the end of a part in brackets or quotes of a text without quotes."""
    limit = position + _MAX_TAIL_CHARS
    if found := _WHOLE_PART.match(text, position, limit):
        return found.end()
    is_open = len(text) < limit and _BEGUN_PART.fullmatch(text, position)
    return UNDECIDED if is_open else REFUTED


def _more_words_at(text: str, position: int) -> int:
    """Tell whether a text without quotes goes on: models forget them around several words."""
    if _SIGN.match(text, position):
        return REFUTED
    is_last = position + 1 == len(text)
    found = _NEXT_WORD.match(text, position)
    if found is None:
        return UNDECIDED if is_last and text[position] == "'" else position
    if found.end() == len(text) and not found["after"]:
        return UNDECIDED
    return REFUTED if found["after"] else position


def _is_lone_end(quote: str, raw: str) -> bool:
    return raw.endswith(quote) and raw.count(quote) % 2 == 1


class LiteralValue:
    """Consumes exactly one value."""

    def __init__(
        self,
        syntax: LiteralSyntax,
        types: JsonTypes,
        ends_at: Callable[[int], int],
        lost_at: Callable[[int], int],
        over_at: Callable[[int], int],
    ) -> None:
        """Begin before a value.

        Args:
            types: Types allowed by the schema. If the value's form is of another type, it is
                converted if possible.
            ends_at: Tells whether a top-level string may end at a position of the text: returns a
                position, or a negative number as in `markup`.
            lost_at: Tells the same of a comma that no quote precedes.
            over_at: Tells whether all calls end at a position.
        """
        self._syntax = syntax
        self._types = types
        self._ends_at = ends_at
        self._lost_at = lost_at
        self._over_at = over_at
        # The end of a text in which another call may be open.
        self._tail = ""
        self.is_last = False
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
        # Of a call inside a value: its brackets, and the quote of a string in it.
        self._inner_closers: list[str] = []
        self._inner_quote = ""
        self.is_complete = False

    @property
    def is_bare(self) -> bool:
        """Whether a value without quotes is being read, or none has begun."""
        return self._step in (self._at_item, self._in_bare)

    def read_from(self, text: str, position: int) -> tuple[str, int]:
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
        if step := _space_at(text, position):
            return step
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
        self._last = self._tail = ""
        is_typed = not self._closers and self._types and "string" not in self._types
        self._writer = ValueWriter(self._types if is_typed else STRING)
        self._step = self._in_string
        return self._separator(), end

    def _quote_at(self, text: str, position: int) -> tuple[str, int]:
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
        if step := _space_at(text, position):
            return step
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
        return self._close_all(lead, position)

    def _close_all(self, lead: str, position: int) -> tuple[str, int]:
        """End the value with all calls: the closing brackets are missing."""
        over = self._over_at(position)
        if over < 0:
            if over == UNDECIDED:
                return lead, over
            raise NotACallError(position)
        lead += self._settle("]")
        if self._is_key:
            raise NotACallError(position)
        lead += "".join(reversed(self._json_ends))
        self._closers.clear()
        self._end_value()
        return lead, position

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
        return self._at_quote(text, position)

    def _at_quote(self, text: str, position: int) -> tuple[str, int]:
        """End a string at a quote, or at a comma that lacks it, or go on with it."""
        end = self._lost_end_at(position) if text[position] == "," else REFUTED
        end = self._string_end_at(text, position) if end == REFUTED else end
        if end == REFUTED:
            return self._refuted_end(text, position)
        if end >= 0 and (inner := self._inner_end_at(text, end)) != REFUTED:
            return self._text(text[position:inner]) if inner >= 0 else "", inner
        if end < 0:
            return "", end
        piece = self._writer.end()
        self._end_value()
        return piece, end

    def _lost_end_at(self, position: int) -> int:
        """Return the position of this comma, if the quote before it is missing."""
        return self._lost_at(position) if self._is_token and not self._closers else REFUTED

    def _inner_end_at(self, text: str, end: int) -> int:
        """Return the end of a quote, if it belongs to a call that the text contains."""
        call = self._syntax.inner_call
        is_open = call and self._is_token and call.search(self._tail)
        if self._closers or not is_open:
            return REFUTED
        is_next_argument = text[end:].lstrip()[:1] == ","
        if not is_next_argument and self._is_quoted_outside(text, end):
            return end
        return self._inner_call_end_at(text, end)

    def _is_quoted_outside(self, text: str, position: int) -> bool:
        """Tell whether a quote comes before the next call."""
        quote, begin = (
            text.find(self._quote, position),
            text.find(self._syntax.call_begin, position),
        )
        return quote >= 0 and not 0 <= begin < quote

    def _inner_call_end_at(self, text: str, end: int) -> int:
        """Return the end of a quote, if a later one outside all calls is left to end the text."""
        syntax, place = self._syntax, end
        while (over := text.find(syntax.block_end, place)) >= 0:
            if self._is_quoted_outside(text, over):
                return end
            place = text.find(syntax.call_begin, over)
            if place < 0:
                break
        return REFUTED if self.is_last else UNDECIDED

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

    def _run_at(self, text: str, position: int) -> tuple[int, int]:
        """Return the number of quotes in a row, and their end; negative if more may come."""
        count = 0
        while (end := after(text, position, self._quote)) >= 0:
            count, position = count + 1, end
        return count, end if end == UNDECIDED else position

    def _quotation_marks(self, text: str, position: int, count: int, end: int) -> tuple[str, int]:
        """Treat quotes in a row as quotation marks, the last one as the end if it may be one."""
        follows = self._follows_at(text, end) if self._closers else self._ends_at(end)
        if follows == UNDECIDED:
            return "", follows
        count -= follows >= 0
        return self._text('"' * count), position + count * len(self._quote)

    def _doubtful_quote(self, text: str, position: int) -> tuple[str, int]:
        """Treat a character that may begin a quote as text; skip a doubled opening quote."""
        end = after(text, position, self._quote)
        if not self._is_token or end < 0:
            return self._text(text[position]), position + 1
        count, run_end = self._run_at(text, position)
        if count >= _LONG_QUOTE and run_end >= 0:
            return self._quotation_marks(text, position, count, run_end)
        if run_end == UNDECIDED or not self._last:
            return "", run_end if run_end == UNDECIDED else end
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
        self._tail = (self._tail + text)[-_MAX_TAIL_CHARS:]
        return self._writer.write(text)

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
        return position if text[position] in followers else self._over_at(position)

    def _in_bare(self, text: str, position: int) -> tuple[str, int]:
        """Collect a value without quotes; its type is known at its end."""
        pattern = self._syntax.bare_key if self._is_key else self._syntax.bare
        end = span_end(pattern, text, position)
        if (bracket := self._inner_call_at(text, position, end)) >= 0:
            self._bare.append(text[position:bracket])
            self._step = self._in_inner_call
            return "", bracket
        self._bare.append(text[position:end])
        if end == len(text):
            return "", end if end > position else UNDECIDED
        part = _part_end(text, end) if self._is_bare_argument else REFUTED
        if part != REFUTED:
            self._bare.append(text[end:part] if part >= 0 else "")
            return "", part if part >= 0 or end == position else end
        operator = self._operator_end(text, end)
        if operator != REFUTED:
            self._bare.append(text[end:operator] if operator >= 0 else "")
            return "", operator if operator >= 0 or end == position else end
        follows = self._bare_text_ends_at(text, end)
        if follows < 0:
            self._bare.append(text[end] if follows == REFUTED else "")
            return "", end + 1 if follows == REFUTED else (end if end > position else UNDECIDED)
        raw = "".join(self._bare).strip()
        self._bare = []
        # A quote at its end belongs to a string that lacks the first one, unless both are there.
        quote = next((each for each in self._syntax.quotes if _is_lone_end(each, raw)), "")
        if not (raw.removesuffix(quote) or self._may_be_empty):
            raise NotACallError(position)
        is_text = self._is_key or bool(quote)
        raw = raw.removesuffix(quote)
        self._bare_first = "" if quote else raw
        piece = json_string(raw) if is_text else self._bare_value(raw)
        self._end_value()
        return piece, end

    def _inner_call_at(self, text: str, position: int, end: int) -> int:
        """Return the position of the bracket of a call that is the value, or a negative number."""
        bracket = text.find("(", position, min(end + 1, len(text)))
        has_brace = self._syntax.has_bare_text and text.startswith("{", end)
        bracket = end if bracket < 0 and has_brace else bracket
        if bracket < 0 or self._is_key or len(self._bare) > MAX_NAME_CHARS:
            return REFUTED
        name = "".join((*self._bare, text[position:bracket]))
        return bracket if _INNER_NAME.fullmatch(name) else REFUTED

    def _in_inner_call(self, text: str, position: int) -> tuple[str, int]:
        """Collect a call in place of a value, as text; no tool runs for it."""
        if position == len(text):
            return "", UNDECIDED
        if self._inner_quote:
            return "", self._in_inner_string(text, position)
        quote, end = self._quote_at(text, position)
        if end == UNDECIDED:
            return "", UNDECIDED
        if quote:
            self._inner_quote = quote
            self._bare.append('"' if quote.startswith("<") else quote)
            return "", end
        over = self._over_at(position)
        if over != REFUTED:
            return self._lost_inner_call(position) if over >= 0 else ("", over)
        char = text[position]
        self._bare.append(char)
        if char in _INNER_BRACKETS:
            self._inner_closers.append(_INNER_BRACKETS[char])
        elif char == self._inner_closers[-1]:
            self._inner_closers.pop()
        if not self._inner_closers:
            # More text may follow, up to a comma or a bracket.
            self._step = self._in_bare
        return "", position + 1

    def _in_inner_string(self, text: str, position: int) -> int:
        """Collect a piece of a string of the call, and return the position after it."""
        quote = self._inner_quote
        end = after(text, position, quote)
        if end == UNDECIDED:
            return UNDECIDED
        if end >= 0:
            self._inner_quote = ""
            self._bare.append('"' if quote.startswith("<") else quote)
            return end
        is_escape = text[position] == "\\" and not quote.startswith("<")
        end = span_end(self._syntax.plain, text, position)
        end = position + 1 + is_escape if end == position else end
        if end > len(text):
            return UNDECIDED
        self._bare.append(text[position:end])
        return end

    def _lost_inner_call(self, position: int) -> tuple[str, int]:
        self._inner_closers.clear()
        raise NotACallError(position)

    def _operator_end(self, text: str, position: int) -> int:
        """Match an operator after a number; an expression is text."""
        if self._is_key or self._syntax.has_bare_text:
            return REFUTED
        if _BEGUN_OPERATOR.fullmatch(text, position):
            return UNDECIDED
        found = _OPERATOR.match(text, position)
        is_number = found and _NUMBER.match("".join(self._bare))
        return found.end() if found and is_number else REFUTED

    def _bare_text_ends_at(self, text: str, position: int) -> int:
        """Match text that may follow a text without quotes, which may have commas and brackets."""
        if self._is_bare_argument:
            if _BEFORE_NEXT.match(text, position):
                return self._ends_at(position)
            return _more_words_at(text, position)
        if not self._is_key and self._syntax.has_bare_text and text[position] not in ",{}[]":
            return self._over_at(position)
        is_text = self._syntax.has_bare_text and self._types == STRING and not self._closers
        return self._ends_at(position) if is_text else position

    @property
    def _is_bare_argument(self) -> bool:
        """Whether the value of an argument may be a text that mistakenly lacks its quotes."""
        is_argument = not (self._is_key or self._closers or self._syntax.has_bare_text)
        return is_argument and bool(self._types & STRING)

    @property
    def _may_be_empty(self) -> bool:
        """Whether a text without quotes may lack its characters too: the value of a key."""
        is_member = not self._closers or self._closers[-1] == "}"
        return self._syntax.has_bare_text and is_member and not self._is_key

    def _bare_value(self, raw: str) -> str:
        types = UNKNOWN if self._closers else self._types
        if not raw:
            return json_value(raw, types)
        is_text = types == STRING and raw.lower() not in _NULLS
        is_scalar = UNKNOWN < types <= SCALARS
        return json_value(raw, STRING if is_text else types if is_scalar else NOT_A_STRING)
