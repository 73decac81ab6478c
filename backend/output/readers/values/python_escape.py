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


def read_escape(text: str, position: int) -> tuple[str, int]:
    """Return the meaning of the escape at a position, and the position after it.

    The position is negative while more text must tell. A backslash that escapes nothing is a
    backslash, as in Python.
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
    return chr(code_point), digits.end()
