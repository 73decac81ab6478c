"""Converts raw argument text to JSON, for formats whose values have no types.

The schema decides. A string is its raw text, whatever it looks like; anything else is JSON,
failing that a Python literal, failing that the raw text. Without a type, only objects and
arrays are distinguished from text; empty text becomes null, an empty array or an empty object.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable

from backend.output.readers.values.json_scanner import SURROGATE, is_number
from backend.output.readers.values.schema import STRING, UNKNOWN, JsonTypes, json_type

_EMPTY_VALUES = (("null", "null"), ("array", "[]"), ("object", "{}"))
ESCAPED_REPLACEMENT = r"\\ufffd"
_CONSTANT = re.compile(r"true|false|null", re.IGNORECASE)


def json_string(text: str) -> str:
    """Return a text as JSON with quotes; an escaped U+FFFD replaces lone surrogates."""
    return f'"{_escaped(text)}"'


def json_text(value: object) -> str:
    """Return a value as strict JSON.

    Raises:
        ValueError: A number in it is not finite.
        TypeError: It cannot be represented in JSON.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return SURROGATE.sub(ESCAPED_REPLACEMENT, text)


def json_value(raw: str, types: JsonTypes) -> str:
    """Return the JSON text of a raw value with one of these types."""
    if types == STRING:
        return json_string(raw)
    for convert in (_as_json, _as_literal):
        candidate = convert(raw)
        if candidate is not None and _is_wanted(candidate, types):
            return candidate
    is_empty = not raw.strip() and "string" not in types
    return (is_empty and _empty_value(types)) or json_string(raw)


class ValueWriter:
    """Converts one value to JSON incrementally: only strings can be emitted before their end."""

    def __init__(
        self, types: JsonTypes, convert: Callable[[str, JsonTypes], str] = json_value
    ) -> None:
        """Begin a value with one of these types; `convert` reads it unless it is a string."""
        self._types = types
        self._convert = convert
        self._is_text = types == STRING
        self._raw: list[str] = []
        self._quote = '"'

    def feed(self, raw: str) -> str:
        """Return the JSON that this text makes certain."""
        if not self._is_text:
            self._raw.append(raw)
            return ""
        quote, self._quote = self._quote, ""
        return quote + _escaped(raw)

    def finish(self) -> str:
        """Return the rest of the value."""
        if self._is_text:
            return self._quote + '"'
        return self._convert("".join(self._raw), self._types)


def _is_wanted(text: str, types: JsonTypes) -> bool:
    """Tell whether JSON text is the value, rather than a string that looks like JSON.

    A schema without strings accepts any JSON: the tool can best report a wrong type.
    """
    found = json_type(json.loads(text))
    if types == UNKNOWN:
        return found in ("object", "array")
    if "string" not in types:
        return True
    return found != "string" and (found in types or (found == "integer" and "number" in types))


def _empty_value(types: JsonTypes) -> str:
    """Return the JSON of a value without text; empty if none of the types can be empty."""
    return next((value for name, value in _EMPTY_VALUES if name in types), "")


def _as_json(raw: str) -> str | None:
    """Return JSON as written, or `None` if it is invalid."""
    text = raw.strip()
    if _CONSTANT.fullmatch(text):
        return text.lower()
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite, parse_int=_finite)
    except (ValueError, RecursionError):
        return None
    written = json.dumps(value, ensure_ascii=False)
    return json_text(value) if SURROGATE.search(written) else text


def _as_literal(raw: str) -> str | None:
    """Return the JSON of a Python literal, or `None` if it is invalid."""
    try:
        with warnings.catch_warnings():
            # An unknown escape in a string is harmless and deserves no warning.
            warnings.simplefilter("ignore")
            value = ast.literal_eval(raw.strip())
        return _as_json(json_text(value))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _escaped(text: str) -> str:
    return json_text(text)[1:-1]


def _finite(number: str) -> float:
    """Return a number; refuse one that overflows a float: strict parsers reject it."""
    if not is_number(number):
        raise ValueError(number)
    return float(number) if not number.lstrip("-").isdecimal() else int(number)


def _refuse(constant: str) -> None:
    """Refuse NaN and the infinities, which Python accepts as JSON."""
    raise ValueError(constant)
