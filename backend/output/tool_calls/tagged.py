"""Calls in tags with raw values between them, `<function=f><parameter=a>…</parameter></function>`.

Nothing in such a value is escaped, so it may hold its own closing tag. A value ends where its
closing tag is followed by what can follow it: another declared parameter, or the end of the
call. What may be a closing tag is held back until that is known.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

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
from backend.output.tool_calls.stepping import SteppingCursor
from backend.output.tool_calls.typed_value import ValueWriter, json_string
from backend.output.tool_calls.wire import WireContext, WireOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedDialect:
    """The tags of a wire.

    Attributes:
        call: How a call begins; its group `name` is the tool's.
        call_end: How it ends.
        parameter: How an argument begins, up to the first character of its value; its group
            `name` is the key.
        parameter_end: How it ends; may refer to groups of its tag, as `re.Match.expand` has it.
        block_end: How a block of calls ends, in wires that have blocks.
        pads_values: Whether a newline at each end of a value belongs to the tags.
        verbatim: Marks that may stand around a value, in which nothing is a tag.
        requires_ends: Whether a parameter without an end is none: where values may hold tags
            that look like those of parameters.
        types_on_wire: Tells the types of a value from its tag; `None` where the schema must.
        make_value: Makes what converts a value of a parameter, where its text is not all.
        json_start: How a JSON object begins that stands for all parameters, where it has tags.
        json_end: How it ends there.
    """

    call: Tag
    call_end: str
    parameter: Tag
    parameter_end: str
    block_end: str = ""
    pads_values: bool = False
    verbatim: tuple[str, str] = ("", "")
    requires_ends: bool = False
    types_on_wire: Callable[[re.Match[str]], JsonTypes | None] | None = None
    make_value: Callable[[ParameterTypes, str], ValueWriter] | None = None
    json_start: Tag | None = None
    json_end: str = ""

    def may_end_with(self, rest: str) -> bool:
        """Tell whether a text is the beginning of what ends a call."""
        return any(end.startswith(rest) for end in (self.call_end, self.block_end, self.json_end))


class TaggedCursor(SteppingCursor):
    """Reads one block of calls, or one call where there is no block around it.

    An opener that begins a call itself says that there is no block. A JSON object in place of
    the parameters is taken for the arguments.
    """

    def __init__(self, context: WireContext, *, dialect: TaggedDialect) -> None:
        self._is_in_block = context.opener != dialect.call.start
        super().__init__(context, opener_is_call=not self._is_in_block)
        self._dialect = dialect
        self._types = ParameterTypes({})
        self._given: set[str] = set()
        self._value = ValueWriter(UNKNOWN)
        self._value_end = ""
        self._may_lack_end = False
        self._json = JsonScanner()

    def finish(self, *, truncated: bool) -> WireOutput:
        """End; after the end of a value, what is missing does no harm unless it was cut off."""
        if truncated:
            return WireOutput()
        self._begin("")
        if self._step == self._in_value and (end := self._closer_at(0)) >= 0:
            self._end_value(self._without_padding(0, end), end)
            self._buffer = self._buffer[end:]
        is_between = self._step in (self._between_parameters, self._after_json, self._at_call_end)
        if is_between and self._dialect.may_end_with(self._buffer.strip()):
            self._end_call(0)
        is_text = self.is_mid_call
        deltas = self._outbox.end("")
        return WireOutput(deltas, rejected=self.held if is_text else "")

    def _before_call(self, position: int) -> int:
        position = self._skip_space(position)
        call = self._next_call_at(position)
        if call.end >= 0:
            self._open_call(call.name, call.end)
            return call.end
        end = self._block_end_at(position) if self._calls_ended else REFUTED
        self._is_over = end >= 0
        return self._expected(position, end, call.end)

    def _open_call(self, name: str, end: int) -> None:
        self._types = self._context.calls.parameter_types(name)
        self._given.clear()
        self._begin_call(name, end)
        self._step = self._between_parameters

    def _between_parameters(self, position: int) -> int:
        position = self._skip_space(position)
        parameter = self._dialect.parameter.match(self._buffer, position)
        if parameter.body is not None:
            self._begin_value(parameter, parameter.body)
            return parameter.end
        json_start = self._json_at(position) if self._missing_end == "{}" else REFUTED
        if json_start >= 0:
            self._json = JsonScanner()
            self._step = self._in_json
            return json_start
        return self._end_call_at(position, either(parameter.end, json_start))

    def _json_at(self, position: int) -> int:
        """Return where a JSON object begins that stands for all parameters."""
        if self._dialect.json_start is not None:
            tag = self._dialect.json_start.match(self._buffer, position)
            position = after_space(self._buffer, tag.end) if tag.end >= 0 else tag.end
        if position < 0:
            return position
        begin = after(self._buffer, position, "{")
        return position if begin >= 0 else begin

    def _end_call_at(self, position: int, otherwise: int = REFUTED) -> int:
        """Take the end of a call: its tag, or for want of it that of the block or the next call."""
        end = after(self._buffer, position, self._dialect.call_end)
        if end == REFUTED:
            ends = (self._block_end_at(position), self._next_call_at(position).end)
            end = position if max(ends) >= 0 else min(ends)
        if end >= 0:
            self._end_call(end)
            self._is_over = not self._dialect.block_end
        return self._expected(position, end, otherwise)

    def _begin_value(self, parameter: TagMatch, tag: re.Match[str]) -> None:
        dialect, name = self._dialect, parameter.name
        self._begin_argument(json_string(name), parameter.end)
        self._given.add(name)
        self._value = self._new_value(name, tag)
        self._value_end = tag.expand(dialect.parameter_end)
        self._may_lack_end = not dialect.requires_ends
        self._step = self._at_value

    def _new_value(self, name: str, tag: re.Match[str]) -> ValueWriter:
        dialect = self._dialect
        if dialect.make_value:
            return dialect.make_value(self._types, name)
        types = dialect.types_on_wire(tag) if dialect.types_on_wire else None
        return ValueWriter(self._types.of(name) if types is None else types)

    def _at_value(self, position: int) -> int:
        """Take what stands before a value and is not its own."""
        if position == len(self._buffer):
            return UNDECIDED
        begin, end = self._dialect.verbatim
        verbatim = after(self._buffer, position, begin) if begin else REFUTED
        if verbatim == UNDECIDED:
            return verbatim
        self._step = self._in_value
        if verbatim == REFUTED:
            is_padded = self._dialect.pads_values and self._buffer.startswith("\n", position)
            return position + is_padded
        self._value_end = end + self._value_end
        self._may_lack_end = False
        return verbatim

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
        for candidate in self._candidates().finditer(self._buffer, position):
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
        if not self._may_lack_end:
            return REFUTED
        line = start + self._buffer.startswith("\n", start)
        follows = either(
            self._next_parameter_at(line, is_bare=True) if line > start else REFUTED,
            self._end_of_call_at(line) if self._is_in_block else REFUTED,
        )
        return line if follows >= 0 else follows

    def _closer_at(self, start: int) -> int:
        line = start + self._buffer.startswith("\n", start)
        return after(self._buffer, line, self._value_end)

    def _candidates(self) -> re.Pattern[str]:
        dialect = self._dialect
        ends = (dialect.call_end, dialect.parameter.start) if self._may_lack_end else ()
        return _places(frozenset(text[0] for text in (self._value_end, *ends)))

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
        # The next block may follow at once: models forget the end of one, or write its start again.
        next_block = after(self._buffer, position, self._context.opener)
        return either(self._block_end_at(position), self._next_call_at(position).end, next_block)

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
        self._send(piece, end - (1 if is_whole else self._json.pending))
        return self._expected(end, REFUTED if self._json.state is JsonState.MALFORMED else end)

    def _after_json(self, position: int) -> int:
        """Take the end tag of a JSON object; it may be missing."""
        position = self._skip_space(position)
        end = after(self._buffer, position, self._dialect.json_end)
        if end == UNDECIDED:
            return UNDECIDED
        self._step = self._at_call_end
        return max(position, end)

    def _at_call_end(self, position: int) -> int:
        return self._end_call_at(self._skip_space(position))

    def _block_end_at(self, position: int) -> int:
        block_end = self._dialect.block_end
        return after(self._buffer, position, block_end) if block_end else REFUTED

    def _next_call_at(self, position: int) -> TagMatch:
        call = self._dialect.call.match(self._buffer, position)
        is_foreign = call.end >= 0 and not self._context.calls.is_offered(call.name)
        return TagMatch(REFUTED) if is_foreign else call


@lru_cache
def _places(first: frozenset[str]) -> re.Pattern[str]:
    """Return a pattern for all places where a value may end: before one of these characters."""
    chars = "".join(map(re.escape, sorted(first)))
    return re.compile(rf"\n?[{chars}]|\n\Z")
