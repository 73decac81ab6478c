"""Reads calls in the syntax of a programming language, `f(a=1)`, with values as it writes them."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from backend.output.readers.literal_values import MAX_QUOTED_CHARS, LiteralSyntax, LiteralValue
from backend.output.readers.patterns import (
    MAX_TAG_CHARS,
    NO_MATCH,
    OPEN_MATCH,
    REFUTED,
    SPACE,
    UNDECIDED,
    Match,
    Pattern,
    Piece,
    after,
    after_space,
    ahead,
    any_of,
    choice,
    either,
    first_match,
    fixed,
    maybe,
    odd_names,
    sequence,
    span_end,
)
from backend.output.readers.reader import (
    NotACallError,
    ReaderContext,
    ReaderOutput,
    SteppingReader,
)
from backend.output.readers.typed_values import (
    UNKNOWN,
    ParameterTypes,
    json_string,
)

_LIST_END = "]"
# Models write one for the other.
_CALL_ENDS = ("}", ")")
_LINK_STARTS = "([:{"
_SENTENCE = re.compile(r"[ \t]++\w")
_BEFORE_BLOCK = re.compile(r"[\s\[]*")
_IN_BLOCK = re.compile(r"[\s,\]]*")
_STRAY_ENDS = re.compile(r"[\s)\]}]*")
# Text on a line of its own, no call, bracket or marker.
_TEXT = re.compile(r"[^\S\n]*+\n\s*+[^\s()\[\]{}\"'`,;:=<|\\]")
# The text after the end of a string.
_AFTER_STRING = r"\s*+(?:[)}\]]|,\s*+\w++\s*+[=:])"
_POSITIONAL = re.compile(r"[rRbBfFuU]{0,2}[\"']|[\[{(\d.-]|(?:True|False|None|true|false|null)\b")
# Arguments as an object, perhaps with the stars that unpack it.
_OBJECT = re.compile(r"(?:\*\*\s*+)?\{")
# A value that has no quote of the text around it, up to the next argument or the last bracket.
_SCALAR = sequence(
    SPACE,
    choice(
        *(sequence(fixed(quote), any_of(rf"[^{quote}]", least=0), fixed(quote)) for quote in "\"'"),
        any_of(r"[\w.+-]"),
    ),
    SPACE,
    choice(ahead(",", *_CALL_ENDS), sequence(any_of(r"\w"), SPACE, fixed("="))),
)
_WHOLE_SCALAR, _BEGUN_SCALAR = re.compile(_SCALAR.whole), re.compile(_SCALAR.begun)
# Lines of a program without a call; a call has its own brackets.
_TO_END_OF_LINE = sequence(any_of(r"[^\n]", least=0), fixed("\n"))
_ASIDE = choice(
    fixed(";"),
    *(sequence(fixed(word), _TO_END_OF_LINE) for word in ("#", "import ", "from ")),
    sequence(fixed("print("), any_of(r"[^()\n]", least=0), fixed(")")),
)
_WHOLE_ASIDE, _BEGUN_ASIDE = re.compile(_ASIDE.whole), re.compile(_ASIDE.begun)
_ASIDES = re.compile(rf"(?:\s*+{_ASIDE.whole})*+")
# A variable, perhaps with its type, that a call is assigned to.
_VARIABLE = r"(?!\d)\w++[ \t]*(?::[ \t]*[\w.\[\]]++[ \t]*)?"
ASSIGNMENT = Piece(
    rf"(?:{_VARIABLE}=[ \t]*)?+",
    r"(?:(?!\d)\w*+[ \t]*(?::[ \t]*[\w.\[\]]*+[ \t]*)?(?:=[ \t]*)?)",
)
_ASSIGNED, _BEGUN_ASSIGNMENT = re.compile(ASSIGNMENT.whole), re.compile(ASSIGNMENT.begun)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralDialect:
    """The syntax of calls.

    Attributes:
        call: The beginning of a call, up to the bracket after its name.
        odd_call: The same, for those of some names that `call` does not read.
        call_begin: The text that begins every call, if any.
        key: The key of an argument, up to its value.
        other_key: The same as models mistakenly write it: with another sign, or in quotes.
        assign: The text between a key and its value.
        block_end: The text that ends a block of calls, which may be in square brackets; empty for
            a bare list of calls, which its bracket ends.
        other_block_ends: Texts that models mistakenly write for it.
        has_positions: Whether arguments may lack keys if the schema gives their order.
        before: Texts that may stand before a call, in this order.
        is_script: Whether the calls are lines of a program.
    """

    call: Pattern
    odd_call: Callable[[tuple[str, ...]], Pattern | None]
    call_begin: str
    call_end: str
    key: Pattern
    other_key: Pattern
    assign: str
    syntax: LiteralSyntax
    block_end: str = ""
    other_block_ends: tuple[str, ...] = ()
    has_positions: bool = False
    before: tuple[str, ...] = ()
    is_script: bool = False


@lru_cache
def _odd_keys(
    key: Pattern, assign: str, quotes: tuple[str, ...], names: tuple[str, ...]
) -> Pattern | None:
    """Return the pattern of those names that are no keys of a dialect, as `filter[x]`."""

    def is_key(name: str) -> bool:
        text = f"{name}{assign}"
        return key.match(text) == Match(len(text), name)

    name = odd_names(filter(str.strip, names), is_key)
    quote = maybe(choice(*map(fixed, quotes)))
    return Pattern((SPACE, quote, name, quote, SPACE, fixed(assign))) if name else None


class LiteralCallReader(SteppingReader):
    """Reads one block or list of calls.

    A call is emitted with its first value. A bare list may be prose that looks like a call: if it
    turns out to be a Markdown link, nothing is emitted.
    """

    def __init__(self, context: ReaderContext, *, dialect: LiteralDialect) -> None:
        opener = context.opener
        self._odd_call = dialect.odd_call(context.calls.names)
        self._dialect = dialect
        is_call = bool(opener) and opener == dialect.call_begin
        # Or a name and its bracket.
        is_call = is_call or self._any_call_at(opener, 0).end == len(opener)
        super().__init__(context, opener_is_call=is_call)
        self._types = ParameterTypes({})
        self._odd_keys: Pattern | None = None
        self._positions: Iterator[str] = iter(())
        self._is_positional = self._is_in_object = False
        self._unsent_key = ""
        self._value = self._new_value("")

    def finish(self, *, truncated: bool) -> ReaderOutput:
        """End; if only the end of the block is missing, the call is complete."""
        if truncated:
            return ReaderOutput()
        self._value.is_last = True
        deltas = self.feed("").deltas if self._step == self._in_value else ()
        held = self.held
        if not self.is_mid_call:
            if self._dialect.is_script:
                line = f"{held}\n"
                held = line[span_end(_ASIDES, line, 0) :].removesuffix("\n")
            is_markup = self._dialect.block_end.startswith(held.strip(" \t\n,]"))
            return ReaderOutput(deltas, rejected="" if is_markup else held)
        call_end = self._missing_call_end()
        if self._is_in_bare_value() or (call_end and self._lacks_arguments(self._name)):
            return ReaderOutput(deltas, rejected=held)
        ends = call_end + self._missing_block_end()
        output = self.feed(ends)
        if self.is_mid_call:
            return ReaderOutput(deltas, rejected=held)
        text = (output.rest or "")[: -len(ends)]
        return ReaderOutput((*deltas, *output.deltas), rejected=text)

    def _is_in_bare_value(self) -> bool:
        """Tell whether the reply ends in a value without quotes, which may not be whole."""
        is_bare = self._step == self._in_value and self._value.is_bare
        return is_bare and not self._buffer.startswith(_CALL_ENDS)

    def _missing_call_end(self) -> str:
        """Return the bracket after the arguments, if only that is missing."""
        is_string = self._step == self._in_value and self._buffer.rstrip() in self._quotes
        has_ended = is_string or (self._step == self._after_value and not self._buffer.strip())
        return self._dialect.call_end if has_ended else ""

    @property
    def _separators(self) -> str:
        """Signs between calls; a program has more after a semicolon."""
        return "," if self._dialect.is_script else ",;"

    @property
    def _bare_end(self) -> tuple[str, ...]:
        """The end of a list without markers."""
        return () if self._dialect.block_end else (_LIST_END,)

    @property
    def _quotes(self) -> tuple[str, ...]:
        return self._dialect.syntax.quotes

    def _missing_block_end(self) -> str:
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
        if call.end == REFUTED and (aside := self._aside_at(position)) != REFUTED:
            return aside
        end = self._block_end_at(position) if self._calls_ended else REFUTED
        if self._calls_ended and self._buffer.startswith(self._bare_end, position):
            # After a comma.
            end = position + len(_LIST_END)
        self._is_over = end >= 0
        return self._expected(position, end, call.end)

    def _aside_at(self, position: int) -> int:
        """Match a line of a program that is no call, or a semicolon."""
        if not self._dialect.is_script or position == len(self._buffer):
            return REFUTED
        limit = position + MAX_TAG_CHARS
        if found := _WHOLE_ASIDE.match(self._buffer, position, limit):
            return found.end()
        is_open = len(self._buffer) < limit and _BEGUN_ASIDE.fullmatch(self._buffer, position)
        return UNDECIDED if is_open else REFUTED

    def _skip_between_calls(self, position: int) -> int:
        if not self._dialect.block_end:
            return self._skip_space(position)
        between = _IN_BLOCK if self._calls_ended else _BEFORE_BLOCK
        return span_end(between, self._buffer, position)

    def _any_call_at(self, text: str, position: int) -> Match:
        """Match a call of any name; the request tells where an odd one ends."""
        return first_match(text, position, self._odd_call, self._dialect.call)

    def _call_at(self, position: int) -> Match:
        """Match a call to an offered tool; refute any other name as soon as it differs."""
        calls = self._context.calls
        call = self._any_call_at(self._buffer, position)
        beginning = self._buffer[position + len(self._dialect.call_begin) :].strip()
        if self._dialect.is_script:
            is_begun = _BEGUN_ASSIGNMENT.fullmatch(beginning)
            beginning = "" if is_begun else beginning[span_end(_ASSIGNED, beginning, 0) :]
        for text in self._dialect.before:
            beginning = "" if text.startswith(beginning) else beginning.removeprefix(text)
        is_hopeless = call.end == UNDECIDED and not calls.may_become_offered(beginning)
        is_foreign = call.end >= 0 and not calls.is_offered(call.name)
        return NO_MATCH if is_hopeless or is_foreign else call

    def _block_end_at(self, position: int) -> int:
        ends = tuple(filter(None, (self._dialect.block_end, *self._dialect.other_block_ends)))
        return either(REFUTED, *(after(self._buffer, position, end) for end in ends))

    def _open_brackets(self, call: Match) -> None:
        self._name = call.name
        self._types = self._context.calls.parameter_types(call.name)
        key, assign = self._dialect.key, self._dialect.assign
        self._odd_keys = _odd_keys(key, assign, self._quotes, tuple(self._types.names))
        self._positions = iter(self._types.names if self._dialect.has_positions else ())
        self._is_in_object = False
        self._step = self._before_first_argument

    def _before_first_argument(self, position: int) -> int:
        """Pass the brace of an object with all arguments, unless the first one may be an object."""
        start = self._skip_space(position)
        if start > position:
            return start
        if position == len(self._buffer) or "**".startswith(self._buffer[position:]):
            return UNDECIDED
        found = _OBJECT.match(self._buffer, position) if self._dialect.has_positions else None
        takes_object = "object" in self._types.of(next(iter(self._types.names), ""))
        self._is_in_object = found is not None and not (takes_object and found[0] == "{")
        self._step = self._before_argument
        return found.end() if found and self._is_in_object else position

    def _before_argument(self, position: int) -> int:
        start = self._skip_space(position)
        if start > position:
            return start
        if self._buffer.startswith(_CALL_ENDS, position):
            self._step = self._after_call
            return position + 1
        key = self._key_at(position)
        if key.end == REFUTED:
            return self._begin_positional(position)
        if key.end >= 0:
            self._positions = iter(())
            self._is_positional = False
            self._value = self._new_value(key.name)
            self._unsent_key = key.name
            self._step = self._in_value
        return key.end

    def _key_at(self, position: int) -> Match:
        """Match the key of an argument; the schema tells where an odd one ends."""
        key = first_match(self._buffer, position, self._odd_keys, self._dialect.key)
        if key.end != REFUTED:
            return key
        other = self._dialect.other_key.match(self._buffer, position)
        is_begun = other.name == self._unsent_key or json_string(other.name) in self._keys
        is_declared = self._is_in_object or other.name in self._types.names
        is_known = other.end < 0 or (is_declared and not is_begun)
        return other if is_known else NO_MATCH

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
        types, syntax = self._types.of(key), self._dialect.syntax
        return LiteralValue(
            syntax, types, self._string_ends_at, self._lost_quote_at, self._block_end_at
        )

    def _hand_out_key(self, key: str, end: int) -> None:
        self._hand_out_name(end)
        self._begin_argument(json_string(key), end)

    def _in_value(self, position: int) -> int:
        piece, end = self._value.read_from(self._buffer, position)
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
        elif self._sibling_at(position).end >= 0:
            # The comma is missing.
            self._step = self._before_argument
            return position
        elif (end := self._block_end_at(position)) != REFUTED:
            # The bracket is missing.
            self._step = self._after_call if end >= 0 else self._step
            return end if end < 0 else position
        else:
            raise NotACallError(position)
        return position + 1

    def _after_call(self, position: int) -> int:
        end = self._end_of_call_at(position)
        text = self._text_at(position) if end == REFUTED else REFUTED
        if text >= 0:
            # The end of the block is missing.
            self._hand_out_name(position)
            self._end_call(position)
            self._is_over = True
            return position
        end = self._expected(position, end, text)
        if end < 0:
            return end
        ends_list = not self._dialect.block_end and self._buffer[end - 1] == _LIST_END
        if ends_list and end == len(self._buffer):
            return UNDECIDED
        if ends_list and self._buffer[end] in _LINK_STARTS:
            raise NotACallError(position)
        if ends_list and self._name and not self._calls_begun:
            # A sentence may begin with a call that has no arguments.
            if _SENTENCE.match(self._buffer, end):
                raise NotACallError(position)
            is_short = len(self._buffer) < end + MAX_TAG_CHARS
            if is_short and not self._buffer[end:].strip(" \t"):
                return UNDECIDED
        self._hand_out_name(end)
        self._end_call(end)
        self._is_over = ends_list
        return end

    def _end_of_call_at(self, position: int) -> int:
        """Match the text that must follow a call; only commas and brackets belong to the call."""
        position = after_space(self._buffer, position)
        is_wrapped = self._is_in_object or any("(" in text for text in self._dialect.before)
        if position >= 0 and is_wrapped and self._buffer[position] in _CALL_ENDS:
            position = after_space(self._buffer, position + 1)
        if position < 0:
            return position
        if self._buffer[position] == _LIST_END:
            return position + 1
        if self._buffer[position] in _CALL_ENDS:
            # One too many.
            end = span_end(_STRAY_ENDS, self._buffer, position)
            follows = self._block_end_at(end)
            return end if follows >= 0 else follows
        if self._buffer[position] in self._separators:
            follows = after_space(self._buffer, position + 1)
            if self._buffer[position] == ",":
                follows = self._next_call_at(follows)
            elif follows >= 0:
                follows = self._call_at(follows).end
            return position + 1 if follows >= 0 else follows
        if self._dialect.block_end:
            return self._next_call_at(position)
        # The comma is missing.
        return min(self._call_at(position).end, position)

    def _next_call_at(self, position: int) -> int:
        """Match a call of any name, or the end of the block."""
        if position < 0 or self._buffer[position] == _LIST_END:
            return position
        next_call = self._any_call_at(self._buffer, position)
        ends = (self._block_end_at(position), self._aside_at(position), self._opener_at(position))
        follows = either(next_call.end, *ends)
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
            end = self._unless_in_program(self._end_of_call_at(position + 1))
            return self._string_before_text_at(position) if end == REFUTED else end
        if self._buffer[position] == ",":
            return self._argument_at(position + 1)
        return either(self._sibling_at(position).end, self._block_end_at(position))

    def _text_at(self, position: int) -> int:
        """Match the end of a call before a line of text, and not before another call."""
        found = _TEXT.match(self._buffer, position)
        call = self._any_call_at(self._buffer, found.end() - 1) if found else Match(0, "")
        if call.end == REFUTED:
            return position
        return UNDECIDED if call.end == UNDECIDED else REFUTED

    def _string_before_text_at(self, bracket: int) -> int:
        """Match the end of a string in a call before a line of text, if no later quote ends it."""
        limit = bracket + MAX_QUOTED_CHARS
        quotes = "|".join(map(re.escape, self._quotes))
        later = re.compile(rf"(?:{quotes}){_AFTER_STRING}").search(self._buffer, bracket, limit)
        is_program = self._text_at(bracket + 1) == REFUTED and not self._other_call_at(bracket + 1)
        if later or is_program:
            return REFUTED
        is_open = len(self._buffer) < limit and not self._value.is_last
        return UNDECIDED if is_open else bracket

    def _other_call_at(self, position: int) -> bool:
        """Tell whether a call of another tool follows on a line of its own."""
        found = _TEXT.match(self._buffer, position)
        call = self._any_call_at(self._buffer, found.end() - 1) if found else NO_MATCH
        return call.end >= 0 and not self._context.calls.is_offered(call.name)

    def _sibling_at(self, position: int) -> Match:
        """Match the key of an argument that is declared and not yet given, without a comma."""
        key = self._key_at(position)
        others = [
            name
            for name in self._types.names
            if name != self._unsent_key and json_string(name) not in self._keys
        ]
        if key.end == UNDECIDED:
            begun = self._buffer[position:].strip()
            return key if any(name.startswith(begun) for name in others) else NO_MATCH
        written = self._buffer[position : key.end]
        is_quoted = any(quote in written for quote in self._quotes)
        if is_quoted or key.name not in others:
            return NO_MATCH
        return key if self._dialect.syntax.has_bare_text else self._before_scalar(key)

    def _before_scalar(self, key: Match) -> Match:
        """Return the match of a key, unless text that is no simple value follows."""
        limit = key.end + MAX_TAG_CHARS
        if _WHOLE_SCALAR.match(self._buffer, key.end, limit):
            return key
        is_open = len(self._buffer) < limit and _BEGUN_SCALAR.fullmatch(self._buffer, key.end)
        return OPEN_MATCH if is_open else NO_MATCH

    def _lost_quote_at(self, comma: int) -> int:
        """Return the position of a comma, if an argument follows, and no quote of this text."""
        key = self._sibling_at(comma + 1)
        if key.end < 0:
            return key.end
        quote, block_end = self._quotes[0], self._dialect.block_end
        begin = after(self._buffer, key.end, quote)
        if begin != REFUTED:
            return self._unless_ended_at(begin, comma)
        again, end = (self._buffer.find(text, key.end) for text in (quote, block_end))
        if max(again, end) < 0:
            return UNDECIDED if len(self._buffer) < comma + MAX_QUOTED_CHARS else REFUTED
        if 0 <= end < again or again < 0:
            return comma if self._buffer[:end].rstrip().endswith(_CALL_ENDS) else REFUTED
        first, last = self._buffer.find(",", key.end, again), self._buffer.rfind(",", 0, again)
        is_next = self._buffer[key.end] in "[{" or self._sibling_at(first + 1).end >= 0
        other = self._sibling_at(last + 1)
        is_key = first >= 0 and is_next and other.end == again and other.name != key.name
        return self._unless_ended_at(again + len(quote), comma) if is_key else REFUTED

    def _unless_ended_at(self, position: int, comma: int) -> int:
        """Return the comma, unless the quote before a position is the end of this text."""
        ends = self._string_ends_at(position) if position >= 0 else position
        return comma if ends == REFUTED else min(ends, REFUTED)

    def _argument_at(self, position: int) -> int:
        position = after_space(self._buffer, position)
        if position < 0:
            return position
        if self._buffer[position] in _CALL_ENDS:
            return self._end_of_call_at(position + 1)
        key = self._key_at(position)
        if key.end == REFUTED and self._is_positional:
            return position if _POSITIONAL.match(self._buffer, position) else REFUTED
        if key.end < 0 or not self._types.names or self._is_due(key.name):
            return key.end
        return self._unless_in_program(self._arguments_end_at(key.end))

    def _is_due(self, key: str) -> bool:
        """Tell whether an argument is declared and not yet given."""
        is_given = key == self._unsent_key or json_string(key) in self._keys
        return key in self._types.names and not is_given

    def _arguments_end_at(self, position: int) -> int:
        """Match the rest of a call from a value on, whose key may as well be text of a string.

        Only a call that is whole has arguments that no schema declares: `'f('a', end='') + b'` is
        one string.
        """
        limit = position + MAX_QUOTED_CHARS
        while 0 <= position < limit:
            end = self._value_end_at(position)
            if end >= 0 and self._buffer[end] == ",":
                end = after_space(self._buffer, end + 1)
                position = self._value_start_at(end) if end >= 0 else end
            if end < 0:
                return end
            if self._buffer[end] in _CALL_ENDS:
                return self._end_of_call_at(end + 1)
            if position <= end:
                return position if position < 0 else self._block_end_at(end)
        return position

    def _unless_in_program(self, end: int) -> int:
        """Return the end of a call, unless the text goes on as a program that a string holds.

        It does if a call of no tool follows that is not whole, as `'a') print('b')'`.
        """
        start = after_space(self._buffer, end) if end >= 0 else REFUTED
        call = self._any_call_at(self._buffer, start) if start >= 0 else NO_MATCH
        if call.end < 0 or self._context.calls.is_offered(call.name):
            return end
        begin = after_space(self._buffer, call.end)
        if begin >= 0 and self._buffer[begin] in _CALL_ENDS:
            whole = self._end_of_call_at(begin + 1)
        else:
            whole = self._arguments_end_at(self._value_start_at(begin)) if begin >= 0 else begin
        return end if whole >= 0 else whole

    def _value_start_at(self, position: int) -> int:
        """Match the key before a value, or nothing before one without a key."""
        key = self._key_at(position)
        is_positional = key.end == REFUTED and _POSITIONAL.match(self._buffer, position)
        return position if is_positional else key.end

    def _value_end_at(self, position: int) -> int:
        """Match a value that a comma or a bracket follows; return their position."""
        ends = tuple(f",{''.join(_CALL_ENDS)}")

        def follows(position: int) -> int:
            position = after_space(self._buffer, position)
            return REFUTED if position >= 0 and self._buffer[position] not in ends else position

        over_at = self._block_end_at
        value = LiteralValue(self._dialect.syntax, UNKNOWN, follows, lambda _: REFUTED, over_at)
        try:
            while position >= 0 and not value.is_complete:
                _, position = value.read_from(self._buffer, position)
        except NotACallError:
            return REFUTED
        return after_space(self._buffer, position) if position >= 0 else position
