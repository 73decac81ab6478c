"""One tool call written as a JSON object, `{"name": …, "arguments": {…}}`, while it is written."""

import json
import re
from collections.abc import Callable
from typing import TypeAlias

from backend.output.tool_calls.json_scanner import JsonScanner, JsonState
from backend.output.tool_calls.wire import CallLedger, NotACallError, Outbox

_ARGUMENT_KEYS = ("arguments", "parameters")
_MAX_KEY_CHARS = 64
_SURROGATE = re.compile("[\ud800-\udfff]")

_Step: TypeAlias = Callable[[str, int], int]


class JsonCallReader:
    """Reads the object behind its opening brace, keys in any order.

    The name is handed out as soon as it is known to be offered, arguments as they come, as the
    model wrote them. Taken as well: `parameters` for `arguments`, an object inside a JSON
    string, none at all, a doubled first brace.

    The last brace of the arguments leaves with the object's own: the arguments of a call that
    never closed are no valid JSON, and nobody takes them for whole.
    """

    def __init__(self, calls: CallLedger, outbox: Outbox, *, name_comes_first: bool) -> None:
        """Begin a call.

        Args:
            calls: Numbers it and knows the names.
            outbox: Takes its deltas.
            name_comes_first: Whether any other order makes it no call.
        """
        self._calls = calls
        self._outbox = outbox
        self._name_comes_first = name_comes_first
        self._step: _Step = self._before_key
        self._scanner = JsonScanner()
        self._key = ""
        self._name = ""
        self._is_named = False
        self._has_arguments = False
        self._wrapped: list[str] = []
        self._unsent: list[str] = []
        self._last_brace = ""
        self.is_complete = False

    def feed(self, text: str, position: int) -> int:
        """Read on, and return the position behind what was taken.

        Raises:
            NotACallError: The text is no call; what was handed out stands.
        """
        while position < len(text) and not self.is_complete:
            position = self._step(text, position)
        return position

    def _before_key(self, text: str, position: int) -> int:
        char = text[position]
        if char == '"':
            self._key = ""
            self._step = self._in_key
        elif char == "}":
            self._end(position + 1)
        elif not (char.isspace() or (char == "{" and not self._key)):
            raise NotACallError(position)
        return position + 1

    def _in_key(self, text: str, position: int) -> int:
        char = text[position]
        if char == '"':
            self._step = self._before_colon
        elif (char.isalnum() or char in "_-") and len(self._key) < _MAX_KEY_CHARS:
            self._key += char
        else:
            raise NotACallError(position)
        return position + 1

    def _before_colon(self, text: str, position: int) -> int:
        char = text[position]
        if char == ":":
            self._step = self._value_step(position)
        elif not char.isspace():
            raise NotACallError(position)
        return position + 1

    def _value_step(self, position: int) -> _Step:
        if self._key == "name" and not self._is_named:
            return self._before_name
        if self._name_comes_first and not self._is_named:
            raise NotACallError(position)
        self._scanner = JsonScanner()
        if self._key not in _ARGUMENT_KEYS:
            return self._in_other_value
        if self._has_arguments:
            raise NotACallError(position)
        self._has_arguments = True
        return self._before_arguments

    def _in_other_value(self, text: str, position: int) -> int:
        """Take a value that means nothing here."""
        _, position = self._scanner.feed(text, position)
        self._follow_scanner(position)
        return position

    def _follow_scanner(self, position: int) -> None:
        if self._scanner.state is JsonState.MALFORMED:
            raise NotACallError(position)
        if self._scanner.state is JsonState.COMPLETE:
            self._step = self._after_value

    def _after_value(self, text: str, position: int) -> int:
        char = text[position]
        if char == ",":
            self._step = self._before_key
        elif char == "}":
            self._end(position + 1)
        elif not char.isspace():
            raise NotACallError(position)
        return position + 1

    def _end(self, position: int) -> None:
        if not self._is_named:
            raise NotACallError(position - 1)
        missing = self._last_brace if self._has_arguments else "{}"
        self._outbox.send(self._calls.extend(missing), position)
        self._calls.complete()
        self.is_complete = True

    def _before_name(self, text: str, position: int) -> int:
        char = text[position]
        if char == '"':
            self._step = self._in_name
        elif not char.isspace():
            raise NotACallError(position)
        return position + 1

    def _in_name(self, text: str, position: int) -> int:
        char = text[position]
        if char == '"' and self._calls.is_offered(self._name):
            self._is_named = True
            self._outbox.send(self._calls.open(self._name), position + 1)
            self._send_arguments("".join(self._unsent), position + 1)
            self._step = self._after_value
        elif char not in '"\\' and self._calls.may_become_offered(self._name + char):
            self._name += char
        else:
            raise NotACallError(position)
        return position + 1

    def _before_arguments(self, text: str, position: int) -> int:
        char = text[position]
        if char.isspace():
            return position + 1
        if char == "{":
            self._step = self._in_arguments
        elif char in '"n':
            self._step = self._in_wrapped_arguments
        else:
            raise NotACallError(position)
        return position

    def _in_arguments(self, text: str, position: int) -> int:
        """Take arguments as they come."""
        piece, position = self._scanner.feed(text, position)
        settled = position
        if self._scanner.state is JsonState.COMPLETE:
            piece, self._last_brace = piece[:-1], piece[-1]
            settled -= 1
        self._send_arguments(piece, settled)
        self._follow_scanner(position)
        return position

    def _in_wrapped_arguments(self, text: str, position: int) -> int:
        """Take arguments that are null or a JSON string with an object in it: at their end."""
        piece, position = self._scanner.feed(text, position)
        self._wrapped.append(piece)
        self._follow_scanner(position)
        if self._scanner.state is JsonState.COMPLETE:
            arguments = _unwrapped("".join(self._wrapped))
            if not arguments:
                raise NotACallError(position)
            self._last_brace = arguments[-1]
            self._send_arguments(arguments[:-1], position)
        return position

    def _send_arguments(self, piece: str, settled: int) -> None:
        """Hand out a piece of the arguments, or keep it until the call has its name."""
        if not self._is_named:
            self._unsent.append(piece)
        elif piece:
            self._outbox.send(self._calls.extend(piece), settled)


def _unwrapped(value: str) -> str:
    """Return the object in a JSON string, `{}` for null and the empty string, else nothing."""
    text = (json.loads(value) or "{}").strip()
    scanner = JsonScanner()
    taken, end = scanner.feed(text)
    is_object = taken.startswith("{") and scanner.state is JsonState.COMPLETE and end == len(text)
    return taken if is_object and not _SURROGATE.search(taken) else ""
