"""Calls in tags with raw values between them, `<function=f><parameter=a>…</parameter></function>`.

Nothing in such a value is escaped, so it may hold its own closing tag. A value ends where its
closing tag is followed by what can follow it: another declared parameter, or the end of the
call. What may be a closing tag is held back until that is known.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from backend.output.tool_calls.json_scanner import JsonScanner, JsonState
from backend.output.tool_calls.markup import (
    REFUTED,
    UNDECIDED,
    Tag,
    TagMatch,
    after,
    after_space,
    either,
)
from backend.output.tool_calls.schema import UNKNOWN, JsonTypes, ParameterTypes
from backend.output.tool_calls.typed_value import ValueWriter, json_string
from backend.output.tool_calls.wire import NotACallError, Outbox, WireContext, WireOutput

_SPACE = re.compile(r"\s*")

_Step: TypeAlias = Callable[[int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedDialect:
    """The tags of a wire.

    Attributes:
        call: How a call begins; its group `name` is the tool's.
        call_end: How it ends.
        parameter: How an argument begins, up to the first character of its value; its group
            `name` is the key.
        parameter_end: How it ends.
        block_end: How a block of calls ends, in wires that have blocks.
        pads_values: Whether a newline at each end of a value belongs to the tags.
        types_on_wire: Tells the types of a value from its tag; `None` where the schema must.
    """

    call: Tag
    call_end: str
    parameter: Tag
    parameter_end: str
    block_end: str = ""
    pads_values: bool = False
    types_on_wire: Callable[[re.Match[str]], JsonTypes | None] | None = None

    def may_end_with(self, rest: str) -> bool:
        """Tell whether a text is the beginning of what ends a call."""
        return self.call_end.startswith(rest) or self.block_end.startswith(rest)


class TaggedCursor:
    """Reads one block of calls, or one call where there is no block around it.

    An opener that begins a call itself says that there is no block. A JSON object in place of
    the parameters is taken for the arguments.
    """

    def __init__(self, context: WireContext, *, dialect: TaggedDialect) -> None:
        self._context = context
        self._dialect = dialect
        self._is_in_block = bool(dialect.block_end) and context.opener != dialect.call.start
        self._outbox = Outbox(context.opener)
        self._buffer = "" if self._is_in_block else context.opener
        self._fed_before = len(self._buffer)
        self._step: _Step = self._before_call
        self._types = ParameterTypes({})
        self._given: set[str] = set()
        self._value = ValueWriter(UNKNOWN)
        self._json = JsonScanner()
        self._missing_end = ""
        self._calls_begun = 0
        self._calls_ended = 0
        self._is_over = False

    @property
    def held(self) -> str:
        """Raw text since the last delta."""
        return self._outbox.held

    @property
    def is_mid_call(self) -> bool:
        """Whether a call is open, or none was complete yet."""
        return self._calls_begun > self._calls_ended or not self._calls_ended

    def feed(self, text: str) -> WireOutput:
        """Read on."""
        self._begin(text)
        position = 0
        try:
            while not self._is_over and (end := self._step(position)) >= 0:
                position = end
        except NotACallError as error:
            return self._reject(text, error.position)
        rest = self._buffer[position:]
        self._buffer = rest
        deltas = self._outbox.end(text)
        return WireOutput(deltas, rest=rest if self._is_over else None)

    def finish(self, *, truncated: bool) -> WireOutput:
        """End; after the end of a value, what is missing does no harm unless it was cut off."""
        if truncated:
            return WireOutput()
        self._begin("")
        if self._step == self._in_value and (end := self._closer_at(0)) >= 0:
            self._end_value(self._without_padding(0, end), end)
            self._buffer = self._buffer[end:]
        is_between = self._step in (self._between_parameters, self._after_json)
        if is_between and self._dialect.may_end_with(self._buffer.strip()):
            self._end_call(0)
        is_text = self.is_mid_call
        deltas = self._outbox.end("")
        return WireOutput(deltas, rejected=self.held if is_text else "")

    def _begin(self, text: str) -> None:
        self._fed_before = len(self._buffer)
        self._buffer += text
        self._outbox.begin()

    def _reject(self, text: str, position: int) -> WireOutput:
        """End with what is no call, or with what just follows the last one."""
        deltas = self._outbox.end(text)
        if not self._calls_begun and not self._is_in_block:
            position = max(position, len(self._context.opener))
        raw, rest = self.held, self._buffer[position:]
        raw = raw[: len(raw) - len(rest)]
        if self.is_mid_call:
            return WireOutput(deltas, rejected=raw, rest=rest)
        return WireOutput(deltas, rest=raw + rest)

    def _before_call(self, position: int) -> int:
        position = self._skip_space(position)
        call = self._next_call_at(position)
        if call.end >= 0:
            self._begin_call(call.name, call.end)
            return call.end
        end = self._block_end_at(position) if self._calls_ended else REFUTED
        self._is_over = end >= 0
        return self._expected(position, end, call.end)

    def _begin_call(self, name: str, end: int) -> None:
        self._calls_begun += 1
        self._types = self._context.calls.parameter_types(name)
        self._missing_end = "{}"
        self._given.clear()
        self._outbox.send(self._context.calls.open(name), end - self._fed_before)
        self._step = self._between_parameters

    def _between_parameters(self, position: int) -> int:
        position = self._skip_space(position)
        parameter = self._dialect.parameter.match(self._buffer, position)
        if parameter.body is not None:
            self._begin_value(parameter.body, parameter.end)
            return parameter.end
        if self._missing_end == "{}" and self._buffer.startswith("{", position):
            self._json = JsonScanner()
            self._step = self._in_json
            return position
        return self._end_call_at(position, parameter.end)

    def _end_call_at(self, position: int, otherwise: int = REFUTED) -> int:
        """Take the end of a call: its tag, or for want of it that of the block or the next call."""
        end = after(self._buffer, position, self._dialect.call_end)
        if end == REFUTED:
            ends = (self._block_end_at(position), self._next_call_at(position).end)
            end = position if max(ends) >= 0 else min(ends)
        if end >= 0:
            self._end_call(end)
        return self._expected(position, end, otherwise)

    def _end_call(self, end: int) -> None:
        self._send(self._missing_end, end)
        self._context.calls.complete()
        self._calls_ended += 1
        self._is_over = not self._dialect.block_end
        self._step = self._before_call

    def _begin_value(self, tag: re.Match[str], end: int) -> None:
        key = json_string(tag["name"])
        self._send(f"{{{key}: " if self._missing_end == "{}" else f", {key}: ", end)
        self._missing_end = "}"
        self._given.add(tag["name"])
        tell = self._dialect.types_on_wire
        types = tell(tag) if tell else None
        self._value = ValueWriter(self._types.of(tag["name"]) if types is None else types)
        self._step = self._at_value if self._dialect.pads_values else self._in_value

    def _at_value(self, position: int) -> int:
        if position == len(self._buffer):
            return UNDECIDED
        self._step = self._in_value
        return position + self._buffer.startswith("\n", position)

    def _in_value(self, position: int) -> int:
        """Pass on the value up to its end, or to where it may end."""
        start, end = self._find_value_end(position)
        if end >= 0:
            self._end_value(start, end, position)
            return end
        if start == position:
            return UNDECIDED
        self._send(self._value.feed(self._buffer[position:start]), start)
        return start

    def _find_value_end(self, position: int) -> tuple[int, int]:
        """Return where the value may end, and where its end tag does, if that is known."""
        for candidate in _candidates(self._dialect).finditer(self._buffer, position):
            start = candidate.start()
            end = self._value_end_at(start)
            if end != REFUTED:
                return self._without_padding(start, end), end
        return len(self._buffer), UNDECIDED

    def _without_padding(self, start: int, end: int) -> int:
        """Return where a value really ends whose end may begin with a newline."""
        is_padding = self._dialect.pads_values or self._closer_at(start) == REFUTED
        has_newline = end >= 0 and self._buffer.startswith("\n", start)
        return start + 1 if has_newline and not is_padding else start

    def _value_end_at(self, start: int) -> int:
        """Return where the end tag of the value ends, if the value ends here."""
        end = self._closer_at(start)
        if end < 0:
            return either(end, self._bare_end_at(start))
        position = after_space(self._buffer, end)
        if position < 0:
            return position
        follows = either(
            self._next_parameter_at(position),
            self._end_of_call_at(position),
            self._block_end_at(position),
            self._next_call_at(position).end,
        )
        return end if follows >= 0 else follows

    def _bare_end_at(self, start: int) -> int:
        """Return where a value ends that lacks its end tag.

        It does before a parameter on a new line, and before all that ends a block.
        """
        line = start + self._buffer.startswith("\n", start)
        follows = either(
            self._next_parameter_at(line, is_bare=True) if line > start else REFUTED,
            self._end_of_call_at(line) if self._is_in_block else REFUTED,
        )
        return line if follows >= 0 else follows

    def _closer_at(self, start: int) -> int:
        line = start + self._buffer.startswith("\n", start)
        return after(self._buffer, line, self._dialect.parameter_end)

    def _next_parameter_at(self, position: int, *, is_bare: bool = False) -> int:
        parameter = self._dialect.parameter.match(self._buffer, position)
        is_next = self._types.is_declared(parameter.name) and not (
            is_bare and parameter.name in self._given
        )
        return parameter.end if parameter.end < 0 or is_next else REFUTED

    def _end_of_call_at(self, position: int) -> int:
        """Look for the end of the call, with what must follow it inside a block."""
        end = after(self._buffer, position, self._dialect.call_end)
        if end < 0 or not self._is_in_block:
            return end
        position = after_space(self._buffer, end)
        if position < 0:
            return position
        return either(self._block_end_at(position), self._next_call_at(position).end)

    def _end_value(self, start: int, end: int, position: int = 0) -> None:
        """Pass on the last piece of a value, and what only its end tells."""
        piece = self._value.feed(self._buffer[position:start])
        self._send(piece + self._value.finish(), end)
        self._step = self._between_parameters

    def _in_json(self, position: int) -> int:
        if position == len(self._buffer):
            return UNDECIDED
        piece, end = self._json.feed(self._buffer, position)
        is_whole = self._json.state is JsonState.COMPLETE
        if is_whole:
            piece, self._missing_end = piece[:-1], piece[-1]
            self._step = self._after_json
        self._send(piece, end - is_whole)
        return self._expected(end, REFUTED if self._json.state is JsonState.MALFORMED else end)

    def _after_json(self, position: int) -> int:
        return self._end_call_at(self._skip_space(position))

    def _block_end_at(self, position: int) -> int:
        block_end = self._dialect.block_end
        return after(self._buffer, position, block_end) if block_end else REFUTED

    def _next_call_at(self, position: int) -> TagMatch:
        call = self._dialect.call.match(self._buffer, position)
        is_foreign = call.end >= 0 and not self._context.calls.is_offered(call.name)
        return TagMatch(REFUTED) if is_foreign else call

    def _skip_space(self, position: int) -> int:
        space = _SPACE.match(self._buffer, position)
        return space.end() if space else position

    def _expected(self, position: int, *ends: int) -> int:
        """Return the end of what must stand at a position."""
        end = either(*ends)
        if end == REFUTED:
            raise NotACallError(position)
        return end

    def _send(self, piece: str, end: int) -> None:
        if piece:
            self._outbox.send(self._context.calls.extend(piece), end - self._fed_before)


@lru_cache
def _candidates(dialect: TaggedDialect) -> re.Pattern[str]:
    """Return a pattern for all places where a value may end."""
    texts = (dialect.parameter_end, dialect.call_end, dialect.parameter.start)
    first = "".join(re.escape(char) for char in sorted({text[0] for text in texts}))
    return re.compile(rf"\n?[{first}]|\n\Z")
