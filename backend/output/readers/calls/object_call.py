"""Reads one tool call in the form of a JSON object, `{"name": …, "arguments": {…}}`."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from backend.output.readers.markup import UNDECIDED
from backend.output.readers.reader import CallLedger, NotACallError, Outbox
from backend.output.readers.values.json_arguments import JsonArguments
from backend.output.readers.values.json_scanner import SURROGATE, JsonScanner, JsonState

_NESTING_KEY = "function"
_HARMLESS_KEYS = frozenset(("type", "id", "index"))
_MAX_KEY_CHARS = 64
_MAX_ID_CHARS = 256

_Step: TypeAlias = Callable[[str, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKeys:
    """The keys of the parts of a call."""

    names: tuple[str, ...] = ("name", _NESTING_KEY)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    ids: tuple[str, ...] = ()


CALL_KEYS = CallKeys()


class ObjectCall:
    """Reads the object after its opening brace, keys in any order.

    The name is emitted as soon as it is known to be offered; arguments are emitted as they arrive,
    as the model wrote them. A later id is emitted at the end and replaces the one that the call was
    given.

    Also accepted: arguments as an object inside a JSON string, a doubled first brace, and name and
    arguments one level deeper, under `function`. An object without arguments is a call only if
    none of its content could be meant as arguments.

    The last brace of the arguments is emitted when the object is closed: the arguments of a call
    that never ends are invalid JSON and never look complete. Small models forget the object's own
    brace; a tag after the arguments, or a stop, also closes the object.
    """

    def __init__(
        self,
        calls: CallLedger,
        outbox: Outbox,
        *,
        keys: CallKeys,
        ends: tuple[str, ...] = (),
        is_doubtful: bool,
    ) -> None:
        """Begin a call.

        Args:
            calls: Numbers the call and knows the tool names.
            outbox: Collects its deltas.
            keys: Keys of its parts.
            ends: Texts that end it.
            is_doubtful: Whether the object may be something else. Then it is a call only if the
                name comes first and only arguments follow, and nothing is emitted before they
                begin.
        """
        self._calls = calls
        self._outbox = outbox
        self._keys = keys
        self._is_doubtful = is_doubtful
        self._step: _Step = self._before_key
        self._scanner = JsonScanner()
        self._key = ""
        self._name = ""
        self._id = ""
        self._given_id = ""
        self._id_pieces: list[str] = []
        self._is_named = False
        self._is_open = False
        self._is_nested = False
        self._has_arguments = False
        self._has_strangers = False
        self._arguments = JsonArguments(ends)
        self._unsent: list[str] = []
        self.is_over = False

    @property
    def is_whole(self) -> bool:
        """Whether the object has been read to its end."""
        return self.is_over

    @property
    def can_close(self) -> bool:
        """Whether the call is complete if the reply ends here."""
        return self.is_over or self._may_lack_brace

    def read(self, text: str, position: int) -> int:
        """Return the position after the consumed text, or a negative number if more is needed.

        Raises:
            NotACallError: The text is not a call; emitted deltas stand.
        """
        return self._step(text, position) if position < len(text) else UNDECIDED

    def close(self, settled: int) -> None:
        """Emit the rest of a complete call."""
        self._open(settled)
        if self._id != self._given_id:
            self._outbox.send(self._calls.identify(self._id), settled)
        self._outbox.send(self._calls.extend(self._arguments.missing_end), settled)
        self._calls.complete()

    def _before_key(self, text: str, position: int) -> int:
        char = text[position]
        if char == '"':
            self._key = ""
            self._step = self._in_key
        elif char == "}":
            self._end_object(position)
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
        """Return the step for the value of a key, if the key is allowed here."""
        self._scanner = JsonScanner()
        if self._key in self._keys.names and not self._is_named:
            return self._before_name
        if self._key in self._keys.ids:
            self._id_pieces = []
            return self._in_id
        if self._key in self._keys.arguments and (self._is_named or not self._is_doubtful):
            if self._has_arguments:
                raise NotACallError(position)
            self._has_arguments = True
            return self._in_arguments
        if self._key not in _HARMLESS_KEYS:
            self._has_strangers = True
            if self._is_doubtful and not self._is_open:
                raise NotACallError(position)
        return self._in_other_value

    def _in_other_value(self, text: str, position: int) -> int:
        """Skip a value."""
        _, position = self._scanner.feed(text, position)
        self._follow_scanner(position)
        return position

    def _in_id(self, text: str, position: int) -> int:
        piece, position = self._scanner.feed(text, position)
        self._id_pieces.append(piece)
        self._follow_scanner(position)
        if self._scanner.state is JsonState.COMPLETE:
            self._id = _as_id("".join(self._id_pieces).strip())
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
            self._end_object(position)
        elif char == "<" and self._may_lack_brace:
            self.is_over = True
            return position
        elif not char.isspace():
            raise NotACallError(position)
        return position + 1

    @property
    def _may_lack_brace(self) -> bool:
        """Whether nothing but the object's closing brace is missing."""
        is_told = self._is_named and self._arguments.is_whole
        return is_told and not (self._is_doubtful or self._is_nested)

    def _end_object(self, position: int) -> None:
        if self._is_nested:
            self._is_nested = False
            self._step = self._after_value
        elif self._is_named and (self._has_arguments or not self._has_strangers):
            self.is_over = True
        else:
            raise NotACallError(position)

    def _before_name(self, text: str, position: int) -> int:
        char = text[position]
        if char == '"':
            self._step = self._in_name
        elif char == "{" and self._key == _NESTING_KEY and not self._is_nested:
            self._is_nested = True
            self._step = self._before_key
        elif not char.isspace():
            raise NotACallError(position)
        return position + 1

    def _in_name(self, text: str, position: int) -> int:
        char = text[position]
        if char == '"' and self._calls.is_offered(self._name):
            self._is_named = True
            self._step = self._after_value
            self._send_arguments("".join(self._unsent), position + 1)
        elif char not in '"\\' and self._calls.may_become_offered(self._name + char):
            self._name += char
        else:
            raise NotACallError(position)
        return position + 1

    def _open(self, settled: int) -> None:
        if not self._is_open:
            self._is_open = True
            self._given_id = self._id
            self._outbox.send(self._calls.open(self._name, self._id), settled)

    def _in_arguments(self, text: str, position: int) -> int:
        """Read arguments as they arrive."""
        piece, position = self._arguments.feed(text, position)
        self._send_arguments(piece, position - self._arguments.kept_back)
        if self._arguments.is_malformed:
            raise NotACallError(position)
        if self._arguments.is_whole:
            self._step = self._after_value
        return position

    def _send_arguments(self, piece: str, settled: int) -> None:
        """Emit a piece of the arguments, or keep it until the name of the call is known."""
        if not self._is_named:
            self._unsent.append(piece)
        elif piece:
            self._open(settled)
            self._outbox.send(self._calls.extend(piece), settled)


def _as_id(value: str) -> str:
    """Return the id in a JSON string or number; otherwise an empty string."""
    if value[0] in "{[tfn":
        return ""
    call_id = json.loads(value) if value.startswith('"') else value
    is_fit = len(call_id) <= _MAX_ID_CHARS and not SURROGATE.search(call_id)
    return call_id if is_fit else ""
