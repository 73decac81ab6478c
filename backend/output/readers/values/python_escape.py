"""Escapes in Python strings."""

import re

from backend.output.readers.markup import UNDECIDED

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
