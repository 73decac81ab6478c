"""Checks of single fields, and of JSON in them; errors name the field."""

import json
import math
import re
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeAlias, TypeVar

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from backend.config import MAX_JSON_CHARS, MAX_JSON_DEPTH, MAX_NAME_BYTES, MAX_PATH_BYTES
from backend.core.prompt import JsonValue
from backend.errors import InvalidRequestError

Number = TypeVar("Number", int, float)


class Range(NamedTuple):
    """Inclusive bounds of a number."""

    low: float
    high: float = math.inf


def require_range(field: str, value: Number, bounds: Range) -> Number:
    """Return a number, or refuse one beyond bounds; not a number is beyond all."""
    low, high = bounds
    if not low <= value <= high:
        limits = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        given = f"{value:g}" if isinstance(value, float) else value
        raise InvalidRequestError(field, f"must be {limits}, not {given}")
    return value


def require_at_most(field: str, values: Sized, limit: int) -> None:
    """Refuse more values than the limit."""
    if len(values) > limit:
        problem = f"holds {len(values)} values, at most {limit} are allowed"
        raise InvalidRequestError(field, problem)


def require_printable(field: str, text: str, max_chars: int) -> str:
    """Return a text that is safe in a log line, or refuse it."""
    if len(text) > max_chars or not text.isprintable():
        raise InvalidRequestError(field, f"must be at most {max_chars} printable characters")
    return text


def require_path(field: str, text: str) -> str:
    """Return a text that could be the path of a file, or refuse it."""
    if "\0" in text:
        raise InvalidRequestError(field, "is not a path: it contains a null character")
    if len(text.encode()) > MAX_PATH_BYTES:
        raise InvalidRequestError(field, f"is a path of more than {MAX_PATH_BYTES} bytes")
    if max(len(name.encode()) for name in text.split("/")) > MAX_NAME_BYTES:
        raise InvalidRequestError(field, f"holds a name of more than {MAX_NAME_BYTES} bytes")
    try:
        Path(text).expanduser()
    except RuntimeError:
        raise InvalidRequestError(field, "is in the home of a user who does not exist") from None
    return text


def require_absolute(field: str, path: str) -> None:
    """Refuse a path that depends on the working directory; `~` is a home."""
    if not Path(path).expanduser().is_absolute():
        raise InvalidRequestError(field, f"must be an absolute path, not {path!r}")


def refuse_mistyped(request: Message, field: str, why: str = "is not text") -> None:
    """Refuse a request with a field in another type than that of its number."""
    number = request.DESCRIPTOR.fields_by_name[field].number
    others = UnknownFieldSet(request)
    if any(others[index].field_number == number for index in range(len(others))):
        raise InvalidRequestError(field, why)


JsonObject: TypeAlias = Mapping[str, JsonValue]
JsonArray: TypeAlias = Sequence[JsonValue]

_ON = frozenset({"true", "1", "yes", "on", "enabled"})
_OFF = frozenset({"false", "0", "no", "off", "disabled", "none"})
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"|[][{}]', re.DOTALL)


def parse_json(field: str, text: str) -> JsonValue:
    """Return the value of the text."""
    if len(text) > MAX_JSON_CHARS:
        problem = f"has {len(text)} characters of JSON, at most {MAX_JSON_CHARS} are read"
        raise InvalidRequestError(field, problem)
    _require_shallow(field, text)
    try:
        value: JsonValue = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(field, "has an escape of half a surrogate pair") from None
    except ValueError as error:
        # After a semicolon Python advises programmers.
        problem = str(error).partition(";")[0]
        raise InvalidRequestError(field, f"is not valid JSON: {problem}") from None
    return value


def require_object(field: str, value: JsonValue) -> JsonObject:
    """Return the value as an object, or refuse it."""
    if isinstance(value, Mapping):
        return value
    raise InvalidRequestError(field, f"must be a JSON object, not {json_type(value)}")


def require_array(field: str, value: JsonValue) -> JsonArray:
    """Return the value as an array, or refuse it."""
    if isinstance(value, list):
        return value
    raise InvalidRequestError(field, f"must be a JSON array, not {json_type(value)}")


def require_name(field: str, value: JsonValue) -> str:
    """Return the value as text that is not blank, or refuse it."""
    if isinstance(value, str) and value.strip():
        return value
    problem = (
        "must not be empty" if isinstance(value, str) else f"must be text, not {json_type(value)}"
    )
    raise InvalidRequestError(field, problem)


def json_type(value: object) -> str:
    """Return the JSON name of the type of a value, with its article."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case Mapping():
            return "an object"
        case _:
            return "an array"


def _require_shallow(field: str, text: str) -> None:
    """Refuse deep nesting before parsing: the parser recurses, and so do later readers."""
    if text.count("[") + text.count("{") <= MAX_JSON_DEPTH:
        return
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        depth += match[0] in "[{"
        depth -= match[0] in "]}"
        if depth > MAX_JSON_DEPTH:
            raise InvalidRequestError(field, f"is nested more than {MAX_JSON_DEPTH} deep")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def require_truth(field: str, text: str) -> bool:
    """Return the truth of `true` or `false`, in any case."""
    word = text.strip().lower()
    if word not in ("true", "false"):
        raise InvalidRequestError(field, f"must be true or false, not {text!r}")
    return word == "true"


def truth(value: JsonValue) -> bool | None:
    """Return the truth that a client means, or `None` if it is none.

    Switches arrive as booleans, as numbers, as words, and as Anthropic's objects with a type.
    """
    match value:
        case bool():
            return value
        case 0 | 1:
            return value == 1
        case str():
            word = value.strip().lower()
            return True if word in _ON else False if word in _OFF else None
        case Mapping():
            kind = value.get("type")
            return truth(kind) if isinstance(kind, str) else None
        case _:
            return None
