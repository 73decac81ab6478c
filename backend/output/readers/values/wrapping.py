"""Takes arguments out of a wrapper that the tool's schema does not know, `{"arguments": {…}}`."""

import json
import re

from backend.output.readers.values.json_scanner import JsonScanner, JsonState
from backend.output.readers.values.schema import ParameterTypes
from backend.output.readers.values.tolerant_json import NotJsonError, read_json
from backend.output.readers.values.typed_value import json_text

_WRAPPERS = frozenset(("arguments", "input", "parameters", "args", "params", "kwargs"))
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"\s*:\s*')
_BEGUN_KEY = re.compile(r'\{\s*(?:"[^"\\]{0,64}(?:"\s*)?)?')


class Unwrapping:
    """Passes the JSON text of one call's arguments on, incrementally.

    Only the first brace of wrapped arguments is passed at once, the rest when they are complete.
    Anything else is passed as it is.
    """

    def __init__(self, types: ParameterTypes) -> None:
        """Begin before the arguments of a tool with these types."""
        self._types = types
        self._is_decided = not types.names
        self._held: list[str] = []
        self._scanner: JsonScanner | None = None

    def feed(self, piece: str) -> str:
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
        scanner.feed(piece)
        if scanner.state is JsonState.OPEN:
            return ""
        self._is_decided = True
        return unwrapped("".join(self._held), self._types).removeprefix("{")


def unwrapped(arguments: str, types: ParameterTypes) -> str:
    """Return the arguments inside wrappers, or the same text if there are none.

    A wrapper has a key that the schema does not declare, and contains only arguments that it does.

    Args:
        arguments: A JSON object.
        types: Names and types of the tool's arguments.
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
