"""Reads calls in program syntax, `f(a="x", n=2)` or `call:f{a:"x",n:2}`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from backend.output.readers.markup import (
    REFUTED,
    UNDECIDED,
    after,
    after_space,
    either,
    span_end,
)
from backend.output.readers.patterns import NO_MATCH, Match, Pattern
from backend.output.readers.reader import NotACallError, ReaderContext, ReaderOutput
from backend.output.readers.stepping_reader import SteppingReader
from backend.output.readers.values.literal import LiteralSyntax, LiteralValue
from backend.output.readers.values.schema import ParameterTypes
from backend.output.readers.values.typed_value import json_string

_LIST_END = "]"
# Models write one for the other.
_CALL_ENDS = ("}", ")")
_LINK_STARTS = "([:{"
_BEFORE_BLOCK = re.compile(r"[\s\[]*")
_IN_BLOCK = re.compile(r"[\s,\]]*")
_POSITIONAL = re.compile(r"[rRbBfFuU]{0,2}[\"']|[\[{(\d.-]|(?:True|False|None|true|false|null)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralDialect:
    """The syntax of calls.

    Attributes:
        call: The beginning of a call, up to the bracket after its name.
        call_begin: The text that begins every call, if any.
        call_end: The bracket after its arguments.
        key: The key of an argument, up to its value.
        syntax: The syntax of values.
        block_end: The text that ends a block of calls, which may be in square brackets; empty for
            a bare list of calls, which its bracket ends.
        other_block_ends: Texts that models mistakenly write for it.
        has_positions: Whether arguments may lack keys if the schema gives their order.
    """

    call: Pattern
    call_begin: str
    call_end: str
    key: Pattern
    syntax: LiteralSyntax
    block_end: str = ""
    other_block_ends: tuple[str, ...] = ()
    has_positions: bool = False


class LiteralCallReader(SteppingReader):
    """Reads one block or list of calls.

    A call is emitted with its first value. A bare list may be prose that looks like a call: if it
    turns out to be a Markdown link, nothing is emitted.
    """

    def __init__(self, context: ReaderContext, *, dialect: LiteralDialect) -> None:
        opener = context.opener
        is_call = bool(opener) and opener == dialect.call_begin
        # Or a name and its bracket.
        is_call = is_call or dialect.call.match(opener).end == len(opener)
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
        """Whether a call is open, emitted or not, or none has been completed yet."""
        return bool(self._name) or super().is_mid_call

    def finish(self, *, truncated: bool) -> ReaderOutput:
        """End; if only the end of the block is missing, the call is complete."""
        if truncated:
            return ReaderOutput()
        held = self.held
        if not self.is_mid_call:
            is_markup = self._dialect.block_end.startswith(held.strip(" \t\n,]"))
            return ReaderOutput(rejected="" if is_markup else held)
        call_end = self._missing_call_end()
        if call_end and self._lacks_arguments(self._name):
            return ReaderOutput(rejected=held)
        output = self.feed(call_end + self._missing_block_end())
        return ReaderOutput(rejected=held) if self.is_mid_call else ReaderOutput(output.deltas)

    def _missing_call_end(self) -> str:
        """Return the bracket after the arguments, if only that is missing."""
        is_string = self._step == self._in_value and self._buffer.rstrip() in self._quotes
        has_ended = is_string or (self._step == self._after_value and not self._buffer.strip())
        return self._dialect.call_end if has_ended else ""

    @property
    def _quotes(self) -> tuple[str, ...]:
        return self._dialect.syntax.quotes

    def _missing_block_end(self) -> str:
        """Return the missing part of the end of the block."""
        # Anything after a list ends it.
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

    def _call_at(self, position: int) -> Match:
        """Match a call to an offered tool; refute any other name as soon as it differs."""
        calls = self._context.calls
        call = self._dialect.call.match(self._buffer, position)
        beginning = self._buffer[position + len(self._dialect.call_begin) :].strip()
        is_hopeless = call.end == UNDECIDED and not calls.may_become_offered(beginning)
        is_foreign = call.end >= 0 and not calls.is_offered(call.name)
        return NO_MATCH if is_hopeless or is_foreign else call

    def _block_end_at(self, position: int) -> int:
        ends = tuple(filter(None, (self._dialect.block_end, *self._dialect.other_block_ends)))
        return either(REFUTED, *(after(self._buffer, position, end) for end in ends))

    def _open_brackets(self, call: Match) -> None:
        self._name = call.name
        self._types = self._context.calls.parameter_types(call.name)
        self._positions = iter(self._types.names if self._dialect.has_positions else ())
        self._step = self._before_argument

    def _hand_out_name(self, end: int) -> None:
        if self._name:
            self._begin_call(self._name, end)
            self._name = ""

    def _before_argument(self, position: int) -> int:
        start = self._skip_space(position)
        if start > position:
            return start
        if self._buffer.startswith(_CALL_ENDS, position):
            self._step = self._after_call
            return position + 1
        key = self._dialect.key.match(self._buffer, position)
        if key.end == REFUTED:
            return self._begin_positional(position)
        if key.end >= 0:
            self._positions = iter(())
            self._is_positional = False
            self._value = self._new_value(key.name)
            self._unsent_key = key.name
            self._step = self._in_value
        return key.end

    def _begin_positional(self, position: int) -> int:
        """Begin a value without a key; it is emitted once it is certain to be a value."""
        key = next(self._positions, "")
        if not key or not _POSITIONAL.match(self._buffer, position):
            raise NotACallError(position)
        self._is_positional = True
        self._value = self._new_value(key)
        self._unsent_key = key
        self._step = self._in_value
        return position

    def _new_value(self, key: str) -> LiteralValue:
        return LiteralValue(self._dialect.syntax, self._types.of(key), self._string_ends_at)

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
        elif self._buffer[position] in _CALL_ENDS:
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
        """Match the text that must follow a call; only commas and brackets belong to the call."""
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
        """Match a call of any name, or the end of the block."""
        if position < 0 or self._buffer[position] == _LIST_END:
            return position
        next_call = self._dialect.call.match(self._buffer, position)
        follows = either(self._block_end_at(position), next_call.end, self._opener_at(position))
        return position if follows >= 0 else follows

    def _opener_at(self, position: int) -> int:
        """Match the next block: models forget the end of one."""
        opener = self._context.opener
        return after(self._buffer, position, opener) if self._dialect.block_end else REFUTED

    def _string_ends_at(self, position: int) -> int:
        """Match text that may follow a string argument."""
        position = after_space(self._buffer, position)
        if position < 0:
            return position
        if self._buffer[position] in _CALL_ENDS:
            return self._end_of_call_at(position + 1)
        return self._argument_at(position + 1) if self._buffer[position] == "," else REFUTED

    def _argument_at(self, position: int) -> int:
        position = after_space(self._buffer, position)
        if position < 0 or self._buffer[position] in _CALL_ENDS:
            return position
        key = self._dialect.key.match(self._buffer, position)
        is_positional = self._is_positional and _POSITIONAL.match(self._buffer, position)
        return position if key.end == REFUTED and is_positional else key.end
