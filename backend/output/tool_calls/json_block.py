"""Calls as JSON objects between two markers, `<tool_call>{"name": …}</tool_call>`.

The wire of Hermes and Qwen. Taken for calls as well: several objects in one block, a list of
them, `parameters` for `arguments`, arguments before the name or as a JSON string, none at all.
"""

import json
import re
from collections.abc import Callable
from typing import TypeAlias

from backend.core.delta import Delta
from backend.output.tool_calls.json_scanner import JsonScanner, JsonState
from backend.output.tool_calls.wire import WireContext, WireOutput

_ARGUMENT_KEYS = ("arguments", "parameters")
_MAX_KEY_CHARS = 64
_SURROGATE = re.compile("[\ud800-\udfff]")

_Step: TypeAlias = Callable[[str, int], int]


class _NoCallError(Exception):
    """The text is no call from `position` on."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


class JsonBlockCursor:
    """Reads one block. A call leaves when its name is known, its arguments as they come.

    The last brace of the arguments leaves with the call's own: the arguments of a call that
    never closed are no valid JSON, so nobody takes them for complete.
    """

    def __init__(self, context: WireContext, *, closer: str) -> None:
        self._calls = context.calls
        self._in_thought = context.in_thought
        self._closer = closer
        self._closer_chars = 0
        self._calls_in_block = 0
        self._raw = [context.opener]
        self._deltas: list[Delta] = []
        self._settled = 0
        self._step: _Step = self._between_calls
        self._is_over = False
        self._begin_call()

    @property
    def held(self) -> str:
        """Raw text since the last delta."""
        return "".join(self._raw)

    @property
    def is_mid_call(self) -> bool:
        """Whether an object is open, or none was complete yet."""
        is_between = self._step in (self._between_calls, self._in_closer)
        return not (is_between and self._calls_in_block)

    def feed(self, text: str) -> WireOutput:
        """Read on."""
        self._deltas, self._settled = [], -1
        position = 0
        try:
            while position < len(text) and not self._is_over:
                position = self._step(text, position)
        except _NoCallError as error:
            return self._reject(text, error.position)
        self._hold(text[:position])
        rest = text[position:] if self._is_over else None
        return WireOutput(tuple(self._deltas), rest=rest)

    def finish(self, *, truncated: bool) -> WireOutput:
        """End: a missing closer does no harm, an unfinished call is text unless cut off."""
        is_text = self.is_mid_call and not truncated
        return WireOutput(rejected=self.held if is_text else "")

    def _reject(self, text: str, position: int) -> WireOutput:
        self._hold(text[:position])
        deltas, raw, rest = tuple(self._deltas), self.held, text[position:]
        if self.is_mid_call:
            return WireOutput(deltas, rejected=raw, rest=rest)
        return WireOutput(deltas, rest=raw + rest)

    def _hold(self, taken: str) -> None:
        if self._settled < 0:
            self._raw.append(taken)
        else:
            self._raw = [taken[self._settled :]]

    def _send(self, delta: Delta, settled: int) -> None:
        """Hand out a delta that accounts for the text up to `settled`."""
        self._deltas.append(delta)
        self._settled = settled

    # Between the calls

    def _between_calls(self, text: str, position: int) -> int:
        char = text[position]
        if char == "{":
            self._begin_call()
            self._step = self._before_key
        elif char == self._closer[0] and self._calls_in_block:
            self._closer_chars = 1
            self._step = self._in_closer
        elif not (char.isspace() or char in (",]" if self._calls_in_block else "[")):
            raise _NoCallError(position)
        return position + 1

    def _in_closer(self, text: str, position: int) -> int:
        if text[position] != self._closer[self._closer_chars]:
            raise _NoCallError(position)
        self._closer_chars += 1
        self._is_over = self._closer_chars == len(self._closer)
        return position + 1

    def _begin_call(self) -> None:
        self._key = ""
        self._name = ""
        self._is_named = False
        self._has_arguments = False
        self._arguments: list[str] = []
        self._last_brace = ""

    # Inside a call's object

    def _before_key(self, text: str, position: int) -> int:
        char = text[position]
        if char == '"':
            self._key = ""
            self._step = self._in_key
        elif char == "}":
            self._end_call(position)
        elif not char.isspace():
            raise _NoCallError(position)
        return position + 1

    def _in_key(self, text: str, position: int) -> int:
        char = text[position]
        if char == '"':
            self._step = self._before_colon
        elif (char.isalnum() or char in "_-") and len(self._key) < _MAX_KEY_CHARS:
            self._key += char
        else:
            raise _NoCallError(position)
        return position + 1

    def _before_colon(self, text: str, position: int) -> int:
        char = text[position]
        if char == ":":
            self._step = self._value_step(position)
        elif not char.isspace():
            raise _NoCallError(position)
        return position + 1

    def _value_step(self, position: int) -> _Step:
        if self._key == "name" and not self._is_named:
            return self._before_name
        if self._in_thought and not self._is_named:
            raise _NoCallError(position)
        self._scanner = JsonScanner()
        if self._key not in _ARGUMENT_KEYS:
            return self._in_other_value
        if self._has_arguments:
            raise _NoCallError(position)
        self._has_arguments = True
        return self._before_arguments

    def _after_value(self, text: str, position: int) -> int:
        char = text[position]
        if char == ",":
            self._step = self._before_key
        elif char == "}":
            self._end_call(position)
        elif not char.isspace():
            raise _NoCallError(position)
        return position + 1

    def _in_other_value(self, text: str, position: int) -> int:
        _, position = self._scanner.feed(text, position)
        self._follow_scanner(position)
        return position

    def _follow_scanner(self, position: int) -> None:
        if self._scanner.state is JsonState.MALFORMED:
            raise _NoCallError(position)
        if self._scanner.state is JsonState.COMPLETE:
            self._step = self._after_value

    def _end_call(self, position: int) -> None:
        if not self._is_named:
            raise _NoCallError(position)
        rest_of_arguments = self._last_brace if self._has_arguments else "{}"
        self._send(self._calls.extend(rest_of_arguments), position + 1)
        self._calls.complete()
        self._calls_in_block += 1
        self._step = self._between_calls

    # The name

    def _before_name(self, text: str, position: int) -> int:
        char = text[position]
        if char == '"':
            self._step = self._in_name
        elif not char.isspace():
            raise _NoCallError(position)
        return position + 1

    def _in_name(self, text: str, position: int) -> int:
        char = text[position]
        if char == '"' and self._calls.is_offered(self._name):
            self._is_named = True
            self._send(self._calls.open(self._name), position + 1)
            self._send_arguments("".join(self._arguments), position + 1)
            self._step = self._after_value
        elif char not in '"\\' and self._calls.may_become_offered(self._name + char):
            self._name += char
        else:
            raise _NoCallError(position)
        return position + 1

    # The arguments

    def _before_arguments(self, text: str, position: int) -> int:
        char = text[position]
        if char.isspace():
            return position + 1
        if char == "{":
            self._step = self._in_object
        elif char in '"n':
            self._step = self._in_wrapped_object
            self._wrapped: list[str] = []
        else:
            raise _NoCallError(position)
        return position

    def _in_object(self, text: str, position: int) -> int:
        """Take arguments as they come."""
        piece, position = self._scanner.feed(text, position)
        settled = position
        if self._scanner.state is JsonState.COMPLETE:
            piece, self._last_brace = piece[:-1], piece[-1]
            settled -= 1
        self._send_arguments(piece, settled)
        self._follow_scanner(position)
        return position

    def _in_wrapped_object(self, text: str, position: int) -> int:
        """Take arguments that are a JSON string with an object in it, or null: at their end."""
        piece, position = self._scanner.feed(text, position)
        self._wrapped.append(piece)
        self._follow_scanner(position)
        if self._scanner.state is JsonState.COMPLETE:
            arguments = _unwrapped("".join(self._wrapped))
            if not arguments:
                raise _NoCallError(position)
            self._last_brace = arguments[-1]
            self._send_arguments(arguments[:-1], position)
        return position

    def _send_arguments(self, piece: str, settled: int) -> None:
        """Hand out a piece of the arguments, or keep it until the call has its name."""
        if not self._is_named:
            self._arguments.append(piece)
        elif piece:
            self._send(self._calls.extend(piece), settled)


def _unwrapped(value: str) -> str:
    """Return the object in a JSON string, `{}` for null and the empty string, else nothing."""
    text = (json.loads(value) or "{}").strip()
    scanner = JsonScanner()
    taken, end = scanner.feed(text)
    is_object = taken.startswith("{") and scanner.state is JsonState.COMPLETE and end == len(text)
    return taken if is_object and not _SURROGATE.search(taken) else ""
