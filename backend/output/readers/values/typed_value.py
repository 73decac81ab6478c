"""Raw text of an argument to JSON, for formats that write values without types.

The schema decides. A string is its raw text, whatever it looks like; anything else is JSON, or
failing that a Python literal, or failing that the raw text. Without a type, only objects and
arrays are told from text; without a text, null, arrays and objects are empty.
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
    """Return a text as JSON, quotes included; U+FFFD, escaped, stands for a lone surrogate."""
    return f'"{_escaped(text)}"'


def json_text(value: object) -> str:
    """Return a value as JSON that any parser takes.

    Raises:
        ValueError: A number in it is not finite.
        TypeError: It is no JSON.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return SURROGATE.sub(ESCAPED_REPLACEMENT, text)


def json_value(raw: str, types: JsonTypes) -> str:
    """Return the JSON text of a raw value that may have these types."""
    if types == STRING:
        return json_string(raw)
    for convert in (_as_json, _as_literal):
        candidate = convert(raw)
        if candidate is not None and _is_wanted(candidate, types):
            return candidate
    is_empty = not raw.strip() and "string" not in types
    return (is_empty and _empty_value(types)) or json_string(raw)


class ValueWriter:
    """Turns one value to JSON while it comes: a string grows, all else waits for its end."""

    def __init__(
        self, types: JsonTypes, convert: Callable[[str, JsonTypes], str] = json_value
    ) -> None:
        """Begin a value that may have these types; `convert` reads it unless it is a string."""
        self._types = types
        self._convert = convert
        self._is_text = types == STRING
        self._raw: list[str] = []
        self._quote = '"'

    def feed(self, raw: str) -> str:
        """Return the JSON that is certain with this text."""
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
    """Tell whether JSON text is the value, and not how a string happens to look.

    A schema without strings is content with any JSON: the tool knows best how to complain.
    """
    found = json_type(json.loads(text))
    if types == UNKNOWN:
        return found in ("object", "array")
    if "string" not in types:
        return True
    return found != "string" and (found in types or (found == "integer" and "number" in types))


def _empty_value(types: JsonTypes) -> str:
    """Return the JSON of a value without text, or nothing if none of the types can be empty."""
    return next((value for name, value in _EMPTY_VALUES if name in types), "")


def _as_json(raw: str) -> str | None:
    """Return JSON as it was written, or nothing if it is none."""
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
    """Return the JSON of a Python literal, or nothing if it is none."""
    try:
        with warnings.catch_warnings():
            # An unknown escape in a string is a matter of taste, and no reason to speak up.
            warnings.simplefilter("ignore")
            value = ast.literal_eval(raw.strip())
        return _as_json(json_text(value))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _escaped(text: str) -> str:
    return json_text(text)[1:-1]


def _finite(number: str) -> float:
    """Return a number; refuse one that no float holds: strict parsers do not take it."""
    if not is_number(number):
        raise ValueError(number)
    return float(number) if not number.lstrip("-").isdecimal() else int(number)


def _refuse(constant: str) -> None:
    """Refuse NaN and the infinities, which Python takes for JSON."""
    raise ValueError(constant)
