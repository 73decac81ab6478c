"""Escapes in Python strings."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from backend.output.readers.patterns import (
    NO_MATCH,
    REFUTED,
    SPACE,
    UNDECIDED,
    Match,
    Pattern,
    after,
    after_space,
    choice,
    either,
    fixed,
    grouped,
    maybe,
    span_end,
)
from backend.output.readers.reader import NotACallError, ReaderContext, ReaderOutput, SteppingReader
from backend.output.readers.typed_values import (
    NOT_A_STRING,
    STRING,
    UNKNOWN,
    JsonTypes,
    ParameterTypes,
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
# So many quotes in a row are those of a text in Python.
_LONG_QUOTE = 3
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
        has_bare_text: Whether a text may lack its quotes.
    """

    quotes: tuple[str, ...]
    plain: re.Pattern[str]
    bare: re.Pattern[str]
    bare_key: re.Pattern[str]
    brackets: Mapping[str, str]
    has_escapes: bool
    format_plain: re.Pattern[str]
    has_bare_text: bool = False


class _LiteralValue:
    """Consumes exactly one value."""

    def __init__(
        self, syntax: LiteralSyntax, types: JsonTypes, ends_at: Callable[[int], int]
    ) -> None:
        """Begin before a value.

        Args:
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
        piece = self._writer.end()
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
        return position if text[position] in followers else REFUTED

    def _in_bare(self, text: str, position: int) -> tuple[str, int]:
        """Collect a value without quotes; its type is known at its end."""
        pattern = self._syntax.bare_key if self._is_key else self._syntax.bare
        end = span_end(pattern, text, position)
        self._bare.append(text[position:end])
        if end == len(text):
            return "", end if end > position else UNDECIDED
        follows = self._bare_text_ends_at(end)
        if follows < 0:
            self._bare.append(text[end] if follows == REFUTED else "")
            return "", end + 1 if follows == REFUTED else (end if end > position else UNDECIDED)
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

    def _bare_text_ends_at(self, position: int) -> int:
        """Match text that may follow a text without quotes, which may have commas and brackets."""
        is_text = self._syntax.has_bare_text and self._types == STRING and not self._closers
        return self._ends_at(position) if is_text else position

    def _bare_value(self, raw: str) -> str:
        types = UNKNOWN if self._closers else self._types
        is_text = types == STRING and raw.lower() not in _NULLS
        return json_value(raw, STRING if is_text else NOT_A_STRING)


_LIST_END = "]"
# Models write one for the other.
_CALL_ENDS = ("}", ")")
_LINK_STARTS = "([:{"
_BEFORE_BLOCK = re.compile(r"[\s\[]*")
_IN_BLOCK = re.compile(r"[\s,\]]*")
_POSITIONAL = re.compile(r"[rRbBfFuU]{0,2}[\"']|[\[{(\d.-]|(?:True|False|None|true|false|null)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralDialect:
    """The syntax of calls.

    Attributes:
        call: The beginning of a call, up to the bracket after its name.
        odd_call: The same, for those of some names that `call` does not read.
        call_begin: The text that begins every call, if any.
        key: The key of an argument, up to its value.
        other_key: The same with a sign that models mistakenly write between them, if any.
        assign: The text between a key and its value.
        block_end: The text that ends a block of calls, which may be in square brackets; empty for
            a bare list of calls, which its bracket ends.
        other_block_ends: Texts that models mistakenly write for it.
        has_positions: Whether arguments may lack keys if the schema gives their order.
        before: Texts that may stand before a call, in this order.
    """

    call: Pattern
    odd_call: Callable[[tuple[str, ...]], Pattern | None]
    call_begin: str
    call_end: str
    key: Pattern
    other_key: Pattern | None
    assign: str
    syntax: LiteralSyntax
    block_end: str = ""
    other_block_ends: tuple[str, ...] = ()
    has_positions: bool = False
    before: tuple[str, ...] = ()


@lru_cache
def _odd_keys(
    key: Pattern, assign: str, quotes: tuple[str, ...], names: tuple[str, ...]
) -> Pattern | None:
    """Return the pattern of those names that are no keys of a dialect, as `filter[x]`."""

    def is_odd(name: str) -> bool:
        text = f"{name}{assign}"
        return bool(name.strip()) and key.match(text) != Match(len(text), name)

    odd = sorted(filter(is_odd, names), key=len, reverse=True)
    if not odd:
        return None
    quote = maybe(choice(*map(fixed, quotes)))
    name = grouped("name", choice(*map(fixed, odd)))
    return Pattern((SPACE, quote, name, quote, SPACE, fixed(assign)))


class LiteralCallReader(SteppingReader):
    """Reads one block or list of calls.

    A call is emitted with its first value. A bare list may be prose that looks like a call: if it
    turns out to be a Markdown link, nothing is emitted.
    """

    def __init__(self, context: ReaderContext, *, dialect: LiteralDialect) -> None:
        opener = context.opener
        self._odd_call = dialect.odd_call(context.calls.names)
        self._dialect = dialect
        is_call = bool(opener) and opener == dialect.call_begin
        # Or a name and its bracket.
        is_call = is_call or self._any_call_at(opener, 0).end == len(opener)
        super().__init__(context, opener_is_call=is_call)
        self._name = ""
        self._types = ParameterTypes({})
        self._odd_keys: Pattern | None = None
        self._positions: Iterator[str] = iter(())
        self._is_positional = False
        self._unsent_key = ""
        self._value = self._new_value("")

    @property
    def is_mid_call(self) -> bool:
        """Whether a call is open, emitted or not, or none has been completed yet."""
        return bool(self._name) or super().is_mid_call

    def finish(self, *, truncated: bool) -> ReaderOutput:
        """End; if only the end of the block is missing, the call is complete."""
        if truncated:
            return ReaderOutput()
        held = self.held
        if not self.is_mid_call:
            is_markup = self._dialect.block_end.startswith(held.strip(" \t\n,]"))
            return ReaderOutput(rejected="" if is_markup else held)
        call_end = self._missing_call_end()
        if call_end and self._lacks_arguments(self._name):
            return ReaderOutput(rejected=held)
        output = self.feed(call_end + self._missing_block_end())
        return ReaderOutput(rejected=held) if self.is_mid_call else ReaderOutput(output.deltas)

    def _missing_call_end(self) -> str:
        """Return the bracket after the arguments, if only that is missing."""
        is_string = self._step == self._in_value and self._buffer.rstrip() in self._quotes
        has_ended = is_string or (self._step == self._after_value and not self._buffer.strip())
        return self._dialect.call_end if has_ended else ""

    @property
    def _quotes(self) -> tuple[str, ...]:
        return self._dialect.syntax.quotes

    def _missing_block_end(self) -> str:
        # Anything after a list ends it.
        end = self._dialect.block_end or f"{_LIST_END}\n"
        came = next(size for size in reversed(range(len(end))) if self._buffer.endswith(end[:size]))
        return end[came:]

    def _before_call(self, position: int) -> int:
        start = self._skip_between_calls(position)
        if start > position:
            return start
        call = self._call_at(position)
        if call.end >= 0:
            self._open_brackets(call)
            return call.end
        end = self._block_end_at(position) if self._calls_ended else REFUTED
        self._is_over = end >= 0
        return self._expected(position, end, call.end)

    def _skip_between_calls(self, position: int) -> int:
        if not self._dialect.block_end:
            return self._skip_space(position)
        between = _IN_BLOCK if self._calls_ended else _BEFORE_BLOCK
        return span_end(between, self._buffer, position)

    def _any_call_at(self, text: str, position: int) -> Match:
        """Match a call of any name; the request tells where an odd one ends."""
        odd = self._odd_call.match(text, position) if self._odd_call else NO_MATCH
        return self._dialect.call.match(text, position) if odd.end == REFUTED else odd

    def _call_at(self, position: int) -> Match:
        """Match a call to an offered tool; refute any other name as soon as it differs."""
        calls = self._context.calls
        call = self._any_call_at(self._buffer, position)
        beginning = self._buffer[position + len(self._dialect.call_begin) :].strip()
        for text in self._dialect.before:
            beginning = "" if text.startswith(beginning) else beginning.removeprefix(text)
        is_hopeless = call.end == UNDECIDED and not calls.may_become_offered(beginning)
        is_foreign = call.end >= 0 and not calls.is_offered(call.name)
        return NO_MATCH if is_hopeless or is_foreign else call

    def _block_end_at(self, position: int) -> int:
        ends = tuple(filter(None, (self._dialect.block_end, *self._dialect.other_block_ends)))
        return either(REFUTED, *(after(self._buffer, position, end) for end in ends))

    def _open_brackets(self, call: Match) -> None:
        self._name = call.name
        self._types = self._context.calls.parameter_types(call.name)
        key, assign = self._dialect.key, self._dialect.assign
        self._odd_keys = _odd_keys(key, assign, self._quotes, tuple(self._types.names))
        self._positions = iter(self._types.names if self._dialect.has_positions else ())
        self._step = self._before_argument

    def _hand_out_name(self, end: int) -> None:
        if self._name:
            self._begin_call(self._name, end)
            self._name = ""

    def _before_argument(self, position: int) -> int:
        start = self._skip_space(position)
        if start > position:
            return start
        if self._buffer.startswith(_CALL_ENDS, position):
            self._step = self._after_call
            return position + 1
        key = self._key_at(position)
        if key.end == REFUTED:
            return self._begin_positional(position)
        if key.end >= 0:
            self._positions = iter(())
            self._is_positional = False
            self._value = self._new_value(key.name)
            self._unsent_key = key.name
            self._step = self._in_value
        return key.end

    def _key_at(self, position: int) -> Match:
        """Match the key of an argument; the schema tells where an odd one ends."""
        odd = self._odd_keys.match(self._buffer, position) if self._odd_keys else NO_MATCH
        if odd.end != REFUTED:
            return odd
        key = self._dialect.key.match(self._buffer, position)
        if key.end != REFUTED or self._dialect.other_key is None:
            return key
        other = self._dialect.other_key.match(self._buffer, position)
        is_known = other.end < 0 or (other.name in self._types.names and self._lacks(other.name))
        return other if is_known else NO_MATCH

    def _lacks(self, key: str) -> bool:
        """Tell whether no argument with this key has begun."""
        return key != self._unsent_key and json_string(key) not in self._keys

    def _begin_positional(self, position: int) -> int:
        """Begin a value without a key; it is emitted once it is certain to be a value."""
        key = next(self._positions, "")
        if not key or not _POSITIONAL.match(self._buffer, position):
            raise NotACallError(position)
        self._is_positional = True
        self._value = self._new_value(key)
        self._unsent_key = key
        self._step = self._in_value
        return position

    def _new_value(self, key: str) -> _LiteralValue:
        return _LiteralValue(self._dialect.syntax, self._types.of(key), self._string_ends_at)

    def _hand_out_key(self, key: str, end: int) -> None:
        self._hand_out_name(end)
        self._begin_argument(json_string(key), end)

    def _in_value(self, position: int) -> int:
        piece, end = self._value.read_from(self._buffer, position)
        if piece and self._unsent_key:
            self._hand_out_key(self._unsent_key, end)
            self._unsent_key = ""
        self._send(piece, end)
        if self._value.is_complete:
            self._step = self._after_value
        return end

    def _after_value(self, position: int) -> int:
        start = self._skip_space(position)
        if start > position:
            return start
        if position == len(self._buffer):
            return UNDECIDED
        if self._buffer[position] == ",":
            self._step = self._before_argument
        elif self._buffer[position] in _CALL_ENDS:
            self._step = self._after_call
        else:
            raise NotACallError(position)
        return position + 1

    def _after_call(self, position: int) -> int:
        end = self._expected(position, self._end_of_call_at(position))
        if end < 0:
            return end
        ends_list = not self._dialect.block_end and self._buffer[end - 1] == _LIST_END
        if ends_list and end == len(self._buffer):
            return UNDECIDED
        if ends_list and self._buffer[end] in _LINK_STARTS:
            raise NotACallError(position)
        self._hand_out_name(end)
        self._end_call(end)
        self._is_over = ends_list
        return end

    def _end_of_call_at(self, position: int) -> int:
        """Match the text that must follow a call; only commas and brackets belong to the call."""
        position = after_space(self._buffer, position)
        if position >= 0 and self._dialect.before and self._buffer[position] in _CALL_ENDS:
            position = after_space(self._buffer, position + 1)
        if position < 0:
            return position
        if self._buffer[position] == _LIST_END:
            return position + 1
        if self._buffer[position] == ",":
            follows = self._next_call_at(after_space(self._buffer, position + 1))
            return position + 1 if follows >= 0 else follows
        return self._next_call_at(position) if self._dialect.block_end else REFUTED

    def _next_call_at(self, position: int) -> int:
        """Match a call of any name, or the end of the block."""
        if position < 0 or self._buffer[position] == _LIST_END:
            return position
        next_call = self._any_call_at(self._buffer, position)
        follows = either(self._block_end_at(position), next_call.end, self._opener_at(position))
        return position if follows >= 0 else follows

    def _opener_at(self, position: int) -> int:
        """Match the next block: models forget the end of one."""
        opener = self._context.opener
        return after(self._buffer, position, opener) if self._dialect.block_end else REFUTED

    def _string_ends_at(self, position: int) -> int:
        """Match text that may follow a string argument."""
        position = after_space(self._buffer, position)
        if position < 0:
            return position
        if self._buffer[position] in _CALL_ENDS:
            return self._end_of_call_at(position + 1)
        return self._argument_at(position + 1) if self._buffer[position] == "," else REFUTED

    def _argument_at(self, position: int) -> int:
        position = after_space(self._buffer, position)
        if position < 0:
            return position
        if self._buffer[position] in _CALL_ENDS:
            return self._end_of_call_at(position + 1)
        key = self._key_at(position)
        is_positional = self._is_positional and _POSITIONAL.match(self._buffer, position)
        return position if key.end == REFUTED and is_positional else key.end
