"""Calls written as such, `f(a="x", n=2)` or `call:f{a:"x",n:2}`: names, brackets and literals."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from backend.output.tool_calls.literal import LiteralReader, LiteralSyntax
from backend.output.tool_calls.markup import (
    REFUTED,
    UNDECIDED,
    Tag,
    TagMatch,
    after,
    after_space,
    either,
    span_end,
)
from backend.output.tool_calls.schema import ParameterTypes
from backend.output.tool_calls.stepping import SteppingCursor
from backend.output.tool_calls.typed_value import json_string
from backend.output.tool_calls.wire import NotACallError, WireContext, WireOutput

_LIST_END = "]"
_LINK_STARTS = "([:{"
_BEFORE_BLOCK = re.compile(r"[\s\[]*")
_IN_BLOCK = re.compile(r"[\s,\]]*")
_POSITIONAL = re.compile(r"[\"'\[{(\d.-]|(?:True|False|None|true|false|null)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralDialect:
    """How calls are written.

    Attributes:
        call: How a call begins, up to the bracket behind its name.
        call_end: The bracket behind its arguments.
        key: An argument's key, up to what stands before its value.
        syntax: How values are written.
        block_end: What ends a block of calls, in which they may stand in square brackets;
            nothing for a bare list of calls, which its bracket ends.
        has_positions: Whether arguments may lack keys where the schema tells their order.
    """

    call: Tag
    call_end: str
    key: Tag
    syntax: LiteralSyntax
    block_end: str = ""
    has_positions: bool = False


class LiteralCallCursor(SteppingCursor):
    """Reads one block or list of calls.

    In a block a call goes out with its name. A bare list may be prose that looks like a call:
    there it goes out with its first argument, and not at all without any if the list turns out
    to be a Markdown link.
    """

    def __init__(self, context: WireContext, *, dialect: LiteralDialect) -> None:
        is_call = bool(context.opener) and context.opener == dialect.call.start
        super().__init__(context, opener_is_call=is_call)
        self._dialect = dialect
        self._name = ""
        self._types = ParameterTypes({})
        self._positions: Iterator[str] = iter(())
        self._is_positional = False
        self._unsent_key = ""
        self._value = self._new_value("")

    @property
    def is_mid_call(self) -> bool:
        """Whether a call is open, be it handed out or not, or none was complete yet."""
        return bool(self._name) or super().is_mid_call

    def finish(self, *, truncated: bool) -> WireOutput:
        """End; where nothing but the end of the block is missing, the call is whole."""
        if truncated:
            return WireOutput()
        held = self.held
        if not self.is_mid_call:
            is_markup = self._dialect.block_end.startswith(held.strip(" \t\n,]"))
            return WireOutput(rejected="" if is_markup else held)
        output = self.feed(self._missing_block_end())
        return WireOutput(rejected=held) if self.is_mid_call else WireOutput(output.deltas)

    def _missing_block_end(self) -> str:
        """Return what of the block's end did not come."""
        # A list has ended when something else follows it.
        end = self._dialect.block_end or f"{_LIST_END}\n"
        came = next(size for size in reversed(range(len(end))) if self._buffer.endswith(end[:size]))
        return end[came:]

    def _before_call(self, position: int) -> int:
        start = self._skip_between_calls(position)
        if start > position:
            return start
        call = self._call_at(position)
        if call.end >= 0:
            self._open_brackets(call)
            return call.end
        end = self._block_end_at(position) if self._calls_ended else REFUTED
        self._is_over = end >= 0
        return self._expected(position, end, call.end)

    def _skip_between_calls(self, position: int) -> int:
        if not self._dialect.block_end:
            return self._skip_space(position)
        between = _IN_BLOCK if self._calls_ended else _BEFORE_BLOCK
        return span_end(between, self._buffer, position)

    def _call_at(self, position: int) -> TagMatch:
        """Look for a call of an offered name; refute any other as soon as it differs."""
        tag, calls = self._dialect.call, self._context.calls
        call = tag.match(self._buffer, position)
        beginning = self._buffer[position + len(tag.start) :].strip()
        is_hopeless = call.end == UNDECIDED and not calls.may_become_offered(beginning)
        is_foreign = call.end >= 0 and not calls.is_offered(call.name)
        return TagMatch(REFUTED) if is_hopeless or is_foreign else call

    def _block_end_at(self, position: int) -> int:
        block_end = self._dialect.block_end
        return after(self._buffer, position, block_end) if block_end else REFUTED

    def _open_brackets(self, call: TagMatch) -> None:
        self._name = call.name
        self._types = self._context.calls.parameter_types(call.name)
        self._positions = iter(self._types.names if self._dialect.has_positions else ())
        self._step = self._before_argument
        if self._dialect.block_end:
            self._hand_out_name(call.end)

    def _hand_out_name(self, end: int) -> None:
        if self._name:
            self._begin_call(self._name, end)
            self._name = ""

    def _before_argument(self, position: int) -> int:
        start = self._skip_space(position)
        if start > position:
            return start
        if self._buffer.startswith(self._dialect.call_end, position):
            self._step = self._after_call
            return position + 1
        key = self._dialect.key.match(self._buffer, position)
        if key.end == REFUTED:
            return self._begin_positional(position)
        if key.end >= 0:
            self._positions = iter(())
            self._is_positional = False
            self._value = self._new_value(key.name)
            self._hand_out_key(key.name, key.end)
            self._step = self._in_value
        return key.end

    def _begin_positional(self, position: int) -> int:
        """Begin a value without a key, which goes out when it is sure to be a value."""
        key = next(self._positions, "")
        if not key or not _POSITIONAL.match(self._buffer, position):
            raise NotACallError(position)
        self._is_positional = True
        self._value = self._new_value(key)
        self._unsent_key = key
        self._step = self._in_value
        return position

    def _new_value(self, key: str) -> LiteralReader:
        return LiteralReader(self._dialect.syntax, self._types.of(key), self._string_ends_at)

    def _hand_out_key(self, key: str, end: int) -> None:
        self._hand_out_name(end)
        self._begin_argument(json_string(key), end)

    def _in_value(self, position: int) -> int:
        piece, end = self._value.feed(self._buffer, position)
        if piece and self._unsent_key:
            self._hand_out_key(self._unsent_key, end)
            self._unsent_key = ""
        self._send(piece, end)
        if self._value.is_complete:
            self._step = self._after_value
        return end

    def _after_value(self, position: int) -> int:
        start = self._skip_space(position)
        if start > position:
            return start
        if position == len(self._buffer):
            return UNDECIDED
        if self._buffer[position] == ",":
            self._step = self._before_argument
        elif self._buffer[position] == self._dialect.call_end:
            self._step = self._after_call
        else:
            raise NotACallError(position)
        return position + 1

    def _after_call(self, position: int) -> int:
        end = self._expected(position, self._end_of_call_at(position))
        if end < 0:
            return end
        ends_list = not self._dialect.block_end and self._buffer[end - 1] == _LIST_END
        if ends_list and end == len(self._buffer):
            return UNDECIDED
        if ends_list and self._buffer[end] in _LINK_STARTS:
            raise NotACallError(position)
        self._hand_out_name(end)
        self._end_call(end)
        self._is_over = ends_list
        return end

    def _end_of_call_at(self, position: int) -> int:
        """Look for what must follow a call; only commas and brackets are its own."""
        position = after_space(self._buffer, position)
        if position < 0:
            return position
        if self._buffer[position] == _LIST_END:
            return position + 1
        if self._buffer[position] == ",":
            follows = self._next_call_at(after_space(self._buffer, position + 1))
            return position + 1 if follows >= 0 else follows
        return self._next_call_at(position) if self._dialect.block_end else REFUTED

    def _next_call_at(self, position: int) -> int:
        """Look for a call of any name, or the end of all."""
        if position < 0 or self._buffer[position] == _LIST_END:
            return position
        next_call = self._dialect.call.match(self._buffer, position)
        follows = either(self._block_end_at(position), next_call.end)
        return position if follows >= 0 else follows

    def _string_ends_at(self, position: int) -> int:
        """Look for what may follow a string that is an argument."""
        position = after_space(self._buffer, position)
        if position < 0:
            return position
        if self._buffer[position] == self._dialect.call_end:
            return self._end_of_call_at(position + 1)
        return self._argument_at(position + 1) if self._buffer[position] == "," else REFUTED

    def _argument_at(self, position: int) -> int:
        position = after_space(self._buffer, position)
        if position < 0 or self._buffer[position] == self._dialect.call_end:
            return position
        key = self._dialect.key.match(self._buffer, position)
        is_positional = self._is_positional and _POSITIONAL.match(self._buffer, position)
        return position if key.end == REFUTED and is_positional else key.end
