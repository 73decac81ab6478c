"""Converts JSON with models' typical errors to valid JSON, and leaves valid parts as written.

The part of the same text that a stream has sent is then a prefix of the result.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from backend.output.readers.json_scanner import (
    SURROGATE,
    JsonScanner,
    JsonState,
    is_number,
    json_number,
)
from backend.output.readers.patterns import span_end
from backend.output.readers.typed_values import (
    ESCAPED_REPLACEMENT,
    JsonTypes,
    ParameterTypes,
    json_string,
    json_text,
    json_value,
)

_SPACE = re.compile(r"\s*")
_JSON_SPACE = re.compile(r"[ \t\n\r]*")
# The text between two members or items: its comma may be missing, doubled, or a semicolon.
_COMMENT = r"/\*(?:[^*]|\*(?!/))*\*/|(?://|\#)[^\n]*"
_GAP = re.compile(rf"(?:\s|[,;]|{_COMMENT})*")
_REMARKS = re.compile(rf"(?:\s|{_COMMENT})*")
_COMMENTS = re.compile(_COMMENT)
_BARE = re.compile(r"[^,{}\[\]()\n]+")
# A number or constant before a comment, a semicolon, or the next key without a comma.
_BARE_SCALAR = re.compile(
    r"""[+-]?[\w.]+(?:[eE][+-]?\d+)?(?=\s*(?:;|//|\#|/\*)|\s+["'][^"'\n]{1,200}["']\s*:)"""
)
# A number with commas between its thousands; in an object no member begins with a digit.
_GROUPED = re.compile(r"[+-]?[1-9]\d{0,2}(?:,\d{3})++(?:\.\d+)?(?=\s*[,}])")
_BARE_KEY = re.compile(r"[^\s:=,;{}\[\]()\"']+")
_HALF_QUOTED_KEY = re.compile(r"[\w-]+[ \t]*[:=][ \t]*[^\s:]")
_ASSIGN = re.compile(r"\s*(?:=>|:|=)\s*")
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_NOT_IN_JSON = frozenset(("NaN", "Infinity", "-Infinity", "undefined"))
_OPENERS = {"{": "}", "[": "]", "(": ")"}
# Python's long one, one that is escaped where no string is open, JavaScript's and typographic ones.
ODD_QUOTES = ('"""', '\\"', '"', "'", "`", "\u201c", "\u201d")
_QUOTE_ENDS = {"\u201c": "\u201d"}
# Escapes of Python, in single quotes, that JSON lacks.
_PYTHON_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|U00(0[0-9a-fA-F]{5}|10[0-9a-fA-F]{4})|.)")
_ODD_IN_QUOTES = re.compile(r"""\\.|"|\\\Z""", re.DOTALL)
# Text that may follow a string, besides the closing bracket of the value around it.
_NEXT_KEY = re.compile(
    r"""\\?["'\u201c\u201d][^"'\u201c\u201d\n]{0,200}["'\u201d]\s*[:=]"""
    r"""|["']{0,2}[\w$-]{1,200}["']{0,2}\s*[:=]"""
)
_NEXT_ITEM = re.compile(r"""["'\u201c\u201d\[{(\d-]|\w+\s*[,\])}]""")
_REST_OF_KEY = re.compile(r"""["'][^"'\n]{1,200}["']\s*:""")
_CLOSING = ")]}"
_CLOSINGS = re.compile(r"[\s)\]}]*")
# An object in a string, whose quotes are not escaped.
_INNER_OBJECT = re.compile(r"""\s*\{\s*["'][^"'\n]{1,200}["']\s*:""")
_SPACE_OR_CLOSING = " \t\n\r)]}"
_MAX_DEPTH = 64


# Models write these in place of an empty object.
NULLS = ("null", "None")
NO_ARGUMENTS = (*NULLS, "[]")


class NotJsonError(ValueError):
    """The text cannot be read as JSON."""


@dataclass(frozen=True, slots=True)
class Repaired:
    """A value as read.

    Attributes:
        reasons: The repairs made, each once.
        members: The members of an object, as JSON by key.
        is_open: Whether the text ended before the value did.
    """

    text: str
    end: int
    reasons: tuple[str, ...]
    members: Mapping[str, str] = field(default_factory=dict)
    is_open: bool = False


def read_json(text: str, position: int, quotes: tuple[str, ...] = ('"', "'")) -> Repaired:
    """Read a value that begins at a position.

    Also accepted: keys and strings without quotes or in other quotes, quotes inside strings,
    constants of Python and JavaScript, comments, missing and superfluous commas, `;` for a comma,
    `=` for a colon, doubled braces, brackets of another kind, and at the end of the text missing
    brackets and a missing quote.

    Args:
        text: A text that ends with the call.
        position: Start of the value; whitespace is skipped.
        quotes: Texts around strings, longer ones first.

    Raises:
        NotJsonError: There is no value, or it ends inside a string.
    """
    reader = _Reader(text, quotes)
    return reader.result(reader.value(span_end(_SPACE, text, position), 0))


def repaired_value(raw: str, types: JsonTypes) -> str:
    """Return the JSON text of a raw value, also of an object or array with errors."""
    plain = json_value(raw, types)
    is_nested = raw.lstrip().startswith(("{", "[")) and bool(types) and "string" not in types
    if not (is_nested and plain.startswith('"')):
        return plain
    if (text := _unescaped(raw)) and not (value := json_value(text, types)).startswith('"'):
        return value
    try:
        found = read_json(raw, 0)
    except NotJsonError:
        return plain
    return plain if raw[found.end :].strip() else found.text


def _unescaped(raw: str) -> str:
    """Return the text of a value that is escaped as in a string without its quotes, or nothing."""
    try:
        return str(json.loads(f'"{raw}"', strict=False))
    except ValueError:
        return ""


def _unescaped_in_python(escape: re.Match[str]) -> str:
    digits = escape[1] or escape[2]
    return json_string(chr(int(digits, 16)))[1:-1] if digits else escape[0]


def read_members(text: str, position: int, quotes: tuple[str, ...], closer: str = "}") -> Repaired:
    """Read an object in program syntax from the position after its bracket, of any kind.

    Raises:
        NotJsonError: There is none, or it ends inside a string.
    """
    reader = _Reader(text, quotes, is_json=False)
    return reader.result(reader.members(position, closer, 0))


class _Reader:
    """Reads one value; `end` is the position after the latest part read."""

    def __init__(
        self,
        text: str,
        quotes: tuple[str, ...],
        *,
        is_json: bool = True,
        may_nest: bool = True,
    ) -> None:
        self._text = text
        self._may_nest = may_nest
        self._is_json = is_json
        self._quotes = quotes
        self._closers: list[str] = []
        self._members: dict[str, str] = {}
        self._is_open = False
        self.end = 0
        self.reasons: list[str] = []

    def result(self, value: str) -> Repaired:
        reasons = tuple(dict.fromkeys(self.reasons))
        return Repaired(value, self.end, reasons, self._members, self._is_open)

    def value(self, position: int, depth: int) -> str:
        if depth > _MAX_DEPTH or position >= len(self._text):
            raise NotJsonError
        char = self._text[position]
        if char == "{":
            return self._object(position + 1, depth)
        if char in "[(":
            return f"[{self._parts(position + 1, _OPENERS[char], depth, self.value)}]"
        if quote := self._quote_at(position):
            return self._string(position, quote)
        return self._bare(position)

    def _object(self, position: int, depth: int) -> str:
        """Read an object, whose braces may be doubled as in a template."""
        is_doubled = self._text.startswith("{", position)
        if is_doubled:
            self.reasons.append("doubled braces")
        value = self.members(position + is_doubled, "}", depth)
        self.end += is_doubled and self._text.startswith("}", self.end)
        return value

    def members(self, position: int, closer: str, depth: int) -> str:
        """Read the members of an object, up to its closing bracket."""
        return f"{{{self._parts(position, closer, depth, self._member)}}}"

    def _parts(
        self, position: int, closer: str, depth: int, read: Callable[[int, int], str]
    ) -> str:
        """Read members or items, up to the bracket around them."""
        self._closers.append(closer)
        pieces: list[str] = []
        while not self._closes(begin := self._gap_end(position), closer):
            pieces.append(self._gap(position, begin, is_first=not pieces))
            pieces.append(read(begin, depth + 1))
            position = self.end
        pieces.append(self._gap(position, begin, is_first=True))
        self._closers.pop()
        return "".join(pieces)

    def _member(self, position: int, depth: int) -> str:
        key = self._key(position)
        assign = _ASSIGN.match(self._text, self.end)
        if assign is None:
            raise NotJsonError
        # A key may be there twice.
        again = re.compile(rf"{re.escape(self._text[position : self.end])}\s*:\s*")
        repeated = again.match(self._text, assign.end())
        value = self.value(repeated.end() if repeated else assign.end(), depth)
        if depth == 1:
            self._members[json.loads(key)] = value
        return f"{key}{self._colon(assign[0])}{value}"

    def _colon(self, assign: str) -> str:
        if not self._is_json:
            return ": "
        if ":" in assign and not assign.strip(": \t\n\r"):
            return assign
        self.reasons.append("an equals sign instead of a colon")
        return ": "

    def _gap_end(self, position: int) -> int:
        """Return the position of the next member, after commas and comments."""
        end = span_end(_GAP, self._text, position)
        while self._is_surplus(end):
            self.reasons.append("a bracket too many")
            end = span_end(_GAP, self._text, end + 1)
        return end

    def _is_surplus(self, position: int) -> bool:
        """Tell whether a bracket closes nothing: no value is open that it could end."""
        char = self._text[position : position + 1]
        if not char or char not in _CLOSING or char in self._closers:
            return False
        follows = span_end(_REMARKS, self._text, position + 1)
        return self._text[follows : follows + 1] in ("," + self._closers[-1])

    def _gap(self, begin: int, end: int, *, is_first: bool) -> str:
        """Return the JSON of the text between two members."""
        lead = self._text[begin : min(end, span_end(_JSON_SPACE, self._text, begin))]
        plain, comments = _COMMENTS.subn("", self._text[begin:end])
        if comments:
            self.reasons.append("a comment")
        if not self._is_json:
            return "" if is_first else ", "
        if is_first:
            return lead
        before, comma, after = plain.partition(",")
        if comma and not before.strip(" \t\n\r") and not after.strip(" \t\n\r"):
            return plain
        self.reasons.append("commas")
        trail = re.sub(r"[^ \t\n\r]", "", plain[len(lead) :])
        return f"{lead},{trail}" if lead or trail else ", "

    def _closes(self, position: int, closer: str) -> bool:
        if position >= len(self._text):
            self.reasons.append("a missing closing bracket")
            self._is_open = True
            self.end = position
            return True
        char = self._text[position]
        if char in _CLOSING:
            if char != closer:
                self.reasons.append("a wrong bracket")
            # A bracket that belongs to an outer value is not consumed.
            is_outer = char != closer and char in self._closers[:-1] and not self._goes_on(position)
            self.end = position + (not is_outer)
            return True
        return False

    def _goes_on(self, position: int) -> bool:
        """Tell whether a member follows a bracket that, if outer, would end the whole value."""
        char = self._text[position]
        if self._closers.index(char) != 0:
            return False
        follows = span_end(_REMARKS, self._text, position + 1)
        if not self._text.startswith(",", follows):
            return False
        return _NEXT_KEY.match(self._text, span_end(_GAP, self._text, follows)) is not None

    def _key(self, position: int) -> str:
        quote = self._quote_at(position)
        if quote and not _HALF_QUOTED_KEY.match(self._text, position + len(quote)):
            return self._string(position, quote, is_key=True)
        # A key that lacks one quote ends before its colon.
        found = _BARE_KEY.match(self._text, position + len(quote))
        if found is None:
            raise NotJsonError
        self.reasons.append("a key without quotes")
        self.end = found.end() + len(self._quote_at(found.end()))
        return json.dumps(found[0], ensure_ascii=False)

    def _quote_at(self, position: int) -> str:
        return next(filter(lambda quote: self._text.startswith(quote, position), self._quotes), "")

    def _string(self, position: int, quote: str, *, is_key: bool = False) -> str:
        """Read a string: a quote ends it only if the text after it can follow a string."""
        begin = position + len(quote)
        closing = _QUOTE_ENDS.get(quote, quote)
        end = self._inner_end(begin, quote)
        end = end if end >= 0 else self._end_of(begin, closing, is_key=is_key)
        if end < 0:
            end = self.end = self._unquoted_end(begin, closing)
        else:
            self.end = end + len(closing)
        if quote != '"':
            self.reasons.append(f"strings in {quote}")
        raw = self._text[begin:end]
        if quote.startswith("<"):
            return json_string(raw)
        return self._as_json(_PYTHON_ESCAPE.sub(_unescaped_in_python, raw) if "'" in quote else raw)

    def _inner_end(self, begin: int, quote: str) -> int:
        """Return the end of a string that is an object with plain quotes, or -1."""
        if not (self._may_nest and _INNER_OBJECT.match(self._text, begin)):
            return -1
        # Each failure may have read to the end of the text.
        self._may_nest = False
        reader = _Reader(self._text, self._quotes, may_nest=False)
        try:
            reader.value(span_end(_SPACE, self._text, begin), 0)
        except NotJsonError:
            return -1
        end = span_end(_SPACE, self._text, reader.end)
        is_end = not reader.result("").is_open and self._text.startswith(quote, end)
        self._may_nest = is_end and self._may_end(begin, end, quote, is_key=False)
        return end if self._may_nest else -1

    def _end_of(self, begin: int, quote: str, *, is_key: bool) -> int:
        """Return the place of the quote that ends a string, or a negative number."""
        end, doubtful = self._text.find(quote, begin), -1
        while end >= 0 and not self._may_end(begin, end, quote, is_key=is_key):
            is_plain = not (is_key or self._is_escaped(begin, end, quote))
            if is_plain and _REST_OF_KEY.match(self._text, end):
                # Either the quote before it is missing, or the text is JSON without escapes.
                raise NotJsonError
            if is_plain and doubtful < 0 and self._is_before_bracket(end + len(quote)):
                doubtful = end
            end = self._text.find(quote, end + 1)
        return end if end >= 0 else doubtful

    def _is_before_bracket(self, position: int) -> bool:
        follows = span_end(_REMARKS, self._text, position)
        return self._text[follows : follows + 1] in (*_CLOSING,)

    def _is_escaped(self, begin: int, end: int, quote: str) -> bool:
        slashes = end
        while slashes > begin and self._text[slashes - 1] == "\\":
            slashes -= 1
        return (end - slashes) % 2 == 1 and not quote.startswith("<")

    def _may_end(self, begin: int, end: int, quote: str, *, is_key: bool) -> bool:
        if self._is_escaped(begin, end, quote):
            return False
        follows = span_end(_REMARKS, self._text, end + len(quote))
        if follows >= len(self._text):
            return True
        if is_key:
            return self._text[follows] in ":="
        return self._may_follow(follows)

    def _may_follow(self, position: int) -> bool:
        """Tell whether a text can follow a value: a bracket, or the next member."""
        char = self._text[position]
        if not self._closers:
            return True
        if char in _CLOSING:
            return self._may_close(position)
        is_member = self._closers[-1] != "]"
        if char in ",;":
            begin = span_end(_GAP, self._text, position)
            follows = _NEXT_KEY if is_member or char == ";" else _NEXT_ITEM
            is_last = begin >= len(self._text) or self._text[begin] in _CLOSING
            return is_last or follows.match(self._text, begin) is not None
        # A comma is missing.
        return is_member and char in self._quotes and bool(_NEXT_KEY.match(self._text, position))

    def _may_close(self, position: int) -> bool:
        """Tell whether brackets after a quote are those around its string, not those of code."""
        end = span_end(_CLOSINGS, self._text, position)
        follows = span_end(_REMARKS, self._text, end)
        char = self._text[follows : follows + 1]
        if not (char and self._is_json) or char in "<{[":
            return True
        if char in ",;":
            begin = span_end(_GAP, self._text, follows)
            nexts = (_NEXT_KEY, _NEXT_ITEM)
            return begin >= len(self._text) or any(each.match(self._text, begin) for each in nexts)
        brackets = self._text[position:end]
        if ")" in brackets and ")" not in self._closers:
            return False
        is_whole = sum(map(brackets.count, _CLOSING)) >= len(self._closers)
        return is_whole or _NEXT_KEY.match(self._text, follows) is not None

    def _unquoted_end(self, begin: int, quote: str) -> int:
        """Return the end of a string without its last quote: before brackets that it did not open.

        Raises:
            NotJsonError: Nothing shows that the string has ended.
        """
        start = len(self._text[begin:].rstrip(_SPACE_OR_CLOSING)) + begin
        body = self._text[begin:start]
        if quote in body.replace(f"\\{quote}", ""):
            raise NotJsonError
        opened = [body.count(opener) - body.count(closer) for opener, closer in _OPENERS.items()]
        brackets = self._text[start:].rstrip()
        while brackets and (missing := max(opened)) > 0:
            # Brackets that the text of the string has opened are its own.
            place = opened.index(missing)
            opened[place] -= 1
            start += 1
            brackets = brackets[1:]
        if not brackets.strip():
            raise NotJsonError
        self.reasons.append("a missing quote")
        return start

    def _as_json(self, raw: str) -> str:
        """Return a string as JSON; valid JSON escapes are kept."""
        return JsonScanner().read_from(f'"{_ODD_IN_QUOTES.sub(self._escaped, raw)}"')[0]

    def _escaped(self, odd: re.Match[str]) -> str:
        """Return an escape, or a quote with the backslash that it needs."""
        found = odd[0]
        if found == "\\'":
            return "'"
        if found == '"':
            self.reasons.append("a quote inside a string")
            return '\\"'
        return found if len(found) > 1 else "\\\\"

    def _is_begun_quote(self, position: int) -> bool:
        rest = self._text[position:].rstrip()
        return any(quote.startswith(rest) for quote in self._quotes)

    def _bare(self, position: int) -> str:
        """Read a number, a constant, or text without quotes."""
        grouped = _GROUPED.match(self._text, position) if self._closers[-1:] == ["}"] else None
        if grouped:
            self.end = grouped.end()
            self.reasons.append("commas in a number")
            return grouped[0].replace(",", "")
        found = _BARE_SCALAR.match(self._text, position) or _BARE.match(self._text, position)
        raw = found[0].rstrip() if found else ""
        if not raw or self._is_begun_quote(position):
            raise NotJsonError
        # A quote at its end belongs to a string that lacks the first one.
        quote = next((quote for quote in self._quotes if raw.endswith(quote)), "")
        self.end = position + len(raw)
        raw = raw.removesuffix(quote)
        if not quote and is_number(raw):
            return raw
        if not quote and (number := json_number(raw)):
            self.reasons.append("a Python number")
            return number
        if not quote and raw.lower() in _CONSTANTS:
            if raw not in _CONSTANTS or raw == "none":
                self.reasons.append("a Python constant")
            return _CONSTANTS[raw.lower()]
        if not quote and raw in _NOT_IN_JSON:
            self.reasons.append(f"{raw} for null")
            return "null"
        self.reasons.append("a string without quotes")
        return json.dumps(raw, ensure_ascii=False)


def object_inside(value: str) -> str:
    """Return the object in a JSON string or list, `{}` if there is none, else nothing."""
    is_list = value.startswith("[")
    text = value[1:-1] if is_list else json.loads(value) or ""
    return _object_of(text.strip())


def _object_of(text: str) -> str:
    """Return a text that is an object, also in Python or in one more string, else nothing."""
    if not text or text in NO_ARGUMENTS:
        return "{}"
    if text.startswith('"'):
        return _object_of(_string_of(text))
    scanner = JsonScanner()
    taken, end = scanner.read_from(text)
    if not taken.startswith("{"):
        return ""
    if scanner.state is not JsonState.COMPLETE or end < len(text):
        taken = _of_python(text)
    return SURROGATE.sub(ESCAPED_REPLACEMENT, taken)


def _string_of(written: str) -> str:
    """Return the text of a JSON string; a text that is no object if it is none."""
    try:
        return str(json.loads(written, strict=False)).strip()
    except ValueError:
        return "?"


def _of_python(text: str) -> str:
    """Return an object that is written as in Python, or nothing."""
    try:
        found = read_json(text, 0, ODD_QUOTES)
    except NotJsonError:
        return ""
    return "" if found.is_open or found.end < len(text) else found.text


_WRAPPERS = frozenset(
    ("arguments", "input", "parameters", "args", "params", "kwargs", "properties")
)
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"\s*:\s*')
_BEGUN_KEY = re.compile(r'\{\s*(?:"[^"\\]{0,64}(?:"\s*)?)?')


class Unwrapping:
    """Passes the JSON text of one call's arguments on, incrementally.

    Only the first brace of wrapped arguments is passed at once, the rest when they are complete.
    Anything else is passed as it is.
    """

    def __init__(self, types: ParameterTypes) -> None:
        self._types = types
        self._is_decided = not types.names
        self._held: list[str] = []
        self._scanner: JsonScanner | None = None

    def unwrap(self, piece: str) -> str:
        """Return the text that this piece makes certain."""
        if self._is_decided:
            return piece
        self._held.append(piece)
        if self._scanner is not None:
            return self._in_wrapper(self._scanner, piece)
        text = "".join(self._held)
        found = _FIRST_KEY.match(text)
        if found and _may_wrap(found[1], self._types):
            self._scanner = JsonScanner()
            return "{" + self._in_wrapper(self._scanner, text)
        if found is None and _BEGUN_KEY.fullmatch(text):
            return ""
        self._is_decided = True
        return text

    def _in_wrapper(self, scanner: JsonScanner, piece: str) -> str:
        scanner.read_from(piece)
        if scanner.state is JsonState.OPEN:
            return ""
        self._is_decided = True
        return unwrapped("".join(self._held), self._types).removeprefix("{")


def unwrapped(arguments: str, types: ParameterTypes) -> str:
    """Return the arguments, a JSON object, inside wrappers, or the same text if there are none.

    A wrapper has a key that the schema does not declare, and contains only arguments that it does.
    """
    found = _FIRST_KEY.match(arguments)
    while found and _may_wrap(found[1], types) and (inner := _inside(arguments, found, types)):
        arguments = inner
        found = _FIRST_KEY.match(arguments)
    return arguments


def _may_wrap(key: str, types: ParameterTypes) -> bool:
    return key in _WRAPPERS and key not in types.names


def _inside(arguments: str, found: re.Match[str], types: ParameterTypes) -> str:
    """Return the arguments inside a wrapper, or nothing if it is an argument itself."""
    key = found[1]
    try:
        others = json.loads(arguments)
        value = others.pop(key)
        text = read_json(value if isinstance(value, str) else json_text(value), 0).text
        inner = json.loads(text)
    except (ValueError, NotJsonError, RecursionError):
        return ""
    if types.takes_others and types.required <= {key, *others}:
        return ""
    is_inner = isinstance(inner, dict) and not inner.keys() & others.keys()
    if not (is_inner and all(_is_known(name, types) for name in (*inner, *others))):
        return ""
    if others:
        return json_text({**inner, **others})
    return text if isinstance(value, str) else arguments[found.end() : -1].rstrip()


def _is_known(name: str, types: ParameterTypes) -> bool:
    return name in types.names or _may_wrap(name, types)
