"""Reads calls in tags around raw values, `<parameter=a>…</parameter>`."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from backend.output.readers.json_calls import JsonArguments
from backend.output.readers.json_scanner import JsonStrings
from backend.output.readers.patterns import (
    NO_MATCH,
    OPEN_MATCH,
    REFUTED,
    UNDECIDED,
    Match,
    Pattern,
    after,
    after_any,
    after_space,
    either,
    first_match,
    span_end,
)
from backend.output.readers.reader import (
    MAX_NAME_CHARS,
    NotACallError,
    ReaderContext,
    ReaderOutput,
    SteppingReader,
    offered_name,
)
from backend.output.readers.tolerant_json import repaired_value
from backend.output.readers.typed_values import (
    SCALARS,
    STRING,
    UNKNOWN,
    JsonTypes,
    ParameterTypes,
    ValueWriter,
    agreed_types,
    json_string,
    text_value,
)

ELEMENT_NAME = "{tag}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedDialect:
    """The tags of a dialect.

    Attributes:
        call: The beginning of a call, up to its arguments.
        odd_call: The same, for those of some names that `call` does not read.
        unmarked_call: The beginning of a call without the mark of its family.
        quoted_call: The beginning of a call in a string of code, if its quotes are escaped there.
        call_begin: The text that begins every call.
        call_ends: Texts that end a call, the correct one first.
        parameter: The beginning of an argument, up to the first character of its value.
        odd_parameter: The same, for those of some names that `parameter` does not read.
        other_parameters: The beginnings of an argument as models mistakenly write them.
        quoted_parameter: The beginning of an argument in a string of code.
        parameter_begin: The text that begins every argument.
        unopened_parameter: The beginning of an argument that lacks its tag, or has that of a call
            in its place, in dialects with a tag after the key.
        nameless_parameter: The beginning of an argument whose tag lacks the name.
        key_end: The tag after a key, if there is one.
        value_begin: The tag before a value, if it differs from the argument's.
        parameter_end: The end of an argument; `ELEMENT_NAME` represents the name of its tag.
        block_ends: Texts that end a block of calls, in formats with blocks.
        other_parameter_ends: Texts that models mistakenly write for the end of an argument.
        has_element_ends: Whether they also name that end after the argument.
        pads_values: Whether newlines around a value belong to the tags.
        verbatim: Optional marks around a value; text between them contains no tags.
        is_inline: Whether arguments follow each other on a line.
        requires_ends: Whether a parameter must have its end, because values may contain tags that
            look like those of parameters.
        types: Types of values as spelled in tags; otherwise the schema decides.
        make_value: Makes the converter of a value, if it is more than its text.
        json_begin: The tag before a JSON object that replaces all arguments, if any.
        json_end: The tag after it.
    """

    call: Pattern
    odd_call: Callable[[tuple[str, ...]], Pattern | None]
    unmarked_call: Pattern | None
    call_begin: str
    call_ends: tuple[str, ...]
    parameter: Pattern
    odd_parameter: Callable[[tuple[str, ...]], Pattern | None]
    other_parameters: tuple[Pattern, ...]
    parameter_begin: str
    parameter_end: str
    unopened_parameter: Pattern | None = None
    nameless_parameter: Pattern | None = None
    quoted_call: Pattern | None = None
    quoted_parameter: Pattern | None = None
    key_end: str = ""
    value_begin: str = ""
    block_ends: tuple[str, ...] = ()
    other_parameter_ends: tuple[str, ...] = ()
    has_element_ends: bool = False
    pads_values: bool = False
    verbatim: tuple[str, str] = ("", "")
    is_inline: bool = False
    requires_ends: bool = False
    types: Mapping[str, JsonTypes] = field(default_factory=dict)
    make_value: Callable[[ParameterTypes, str], ValueWriter] | None = None
    json_begin: Pattern | None = None
    json_end: str = ""

    def may_end_with(self, rest: str) -> bool:
        """Tell whether a text is a prefix of a text that ends a call."""
        ends = (*self.call_ends, *self.block_ends, self.json_end)
        return any(end.startswith(rest) for end in ends)


_MAX_STRAYS = 3
# The attribute of an argument's tag that may contain its value.
_VALUE_KEY = "value"
_MAX_MENTION_CHARS = 4096
_NAME = re.compile(r"""\s*["']*([^\s<>"'/]*)""")
_MAYBE_LINE = re.compile(r"(?:\r?\n|\r\Z)?")


class _TagLookahead(SteppingReader):
    """Recognises the tags of a dialect.

    Returns positions in the buffer, or negative numbers as in `markup`.
    """

    def __init__(self, context: ReaderContext, *, dialect: TaggedDialect) -> None:
        self._is_in_block = not dialect.call_begin.startswith(context.opener)
        super().__init__(context, opener_is_call=not self._is_in_block)
        self._dialect = dialect
        self._odd_call = dialect.odd_call(context.calls.names)

    def _any_at(self, position: int, texts: tuple[str, ...]) -> int:
        return after_any(self._buffer, position, texts)

    def _skip_strays(self, position: int, texts: tuple[str, ...]) -> int:
        """Return the position after repeated closing tags."""
        for _ in range(_MAX_STRAYS):
            position = after_space(self._buffer, position)
            end = self._any_at(position, texts) if position >= 0 else REFUTED
            if position < 0 or end == REFUTED:
                return position
            if end == UNDECIDED:
                return UNDECIDED
            position = end
        return after_space(self._buffer, position)

    def _end_of_call_at(self, position: int) -> int:
        """Match the end of the call, and inside a block the text that must follow."""
        call_ends = self._dialect.call_ends
        end = self._any_at(position, call_ends)
        if end < 0 or not self._is_in_block:
            return end
        position = self._skip_strays(end, call_ends)
        if position < 0:
            return position
        # The next block may follow at once: models forget the end of a block, or repeat its start.
        next_block = after(self._buffer, position, self._context.opener)
        next_call = either(self._next_call_at(position).end, self._damaged_call_at(position))
        return either(self._block_end_at(position), next_call, next_block)

    def _damaged_call_at(self, position: int) -> int:
        """Match the beginning of a call to an offered tool, whatever follows."""
        begin = after(self._buffer, position, self._dialect.call_begin)
        if begin < 0:
            return begin
        name = _NAME.match(self._buffer, begin)
        if name is None or name.end() == len(self._buffer):
            return UNDECIDED if len(self._buffer) - begin < MAX_NAME_CHARS else REFUTED
        return begin if self._context.calls.is_offered(name[1]) else REFUTED

    def _block_end_at(self, position: int) -> int:
        return self._any_at(position, self._dialect.block_ends)

    def _next_call_at(self, position: int) -> Match:
        # The request tells where an odd name ends.
        dialect = self._dialect
        patterns = (self._odd_call, dialect.call, dialect.unmarked_call)
        call = first_match(self._buffer, position, *patterns)
        if call.end < 0:
            return call
        name = offered_name(call.name, self._context.calls)
        return replace(call, name=name) if name else self._glued_call(call)

    def _next_block_at(self, position: int) -> Match:
        """Match the opener of another block, with the beginning of a call."""
        opener = self._context.opener.lstrip() if self._is_in_block else ""
        begin = after(self._buffer, position, opener) if opener else REFUTED
        inside = after_space(self._buffer, begin) if begin >= 0 else begin
        return self._next_call_at(inside) if inside >= 0 else Match(inside)

    def _glued_call(self, call: Match) -> Match:
        """Match a call whose first key follows its name at once, without the tag of a key."""
        calls, word = self._context.calls, call.name
        key_end = self._dialect.key_end
        follows = after(self._buffer, call.end, key_end) if key_end else REFUTED
        if follows == UNDECIDED:
            return OPEN_MATCH
        for name in calls.names if follows >= 0 else ():
            key = word.removeprefix(name)
            if key != word and calls.parameter_types(name).is_declared(key):
                return Match(call.end - len(key), name)
        return NO_MATCH


@dataclass(slots=True)
class _DoubtfulEnd:
    """An end of a value that counts if no better one follows.

    It stands in a call that the value itself contains, as text about calls does, lacks its tag
    in a dialect that requires one, or is followed by the end of the call but not of the block.

    Attributes:
        depth: How many calls inside the value are open.
        end: The end, relative to its first character; all text since that waits.
        read: How much of that text has been read.
    """

    depth: int = 0
    end: int | None = None
    read: int = 0


class TaggedReader(_TagLookahead):
    """Reads one block of calls, or a single call without a block.

    An opener that itself begins a call means that there is no block. A JSON object in place of the
    parameters is read as the arguments.
    """

    def __init__(self, context: ReaderContext, *, dialect: TaggedDialect) -> None:
        super().__init__(context, dialect=dialect)
        self._types = ParameterTypes({})
        self._odd_parameter: Pattern | None = None
        self._given: set[str] = set()
        self._beside: Mapping[str, str] = {}
        self._value = ValueWriter(UNKNOWN)
        self._value_ends: tuple[str, ...] = ("",)
        self._may_lack_end = False
        self._verbatim_end = ""
        self._element = ""
        self._inner_begin = ""
        self._inner_open = 0
        self._doubt = _DoubtfulEnd()
        self._padding = ""
        self._is_scalar = False
        self._strings: JsonStrings | None = None
        self._json = JsonArguments()

    def finish(self, *, truncated: bool) -> ReaderOutput:
        """End; after the end of a value, missing tags do no harm unless the reply was cut off."""
        if truncated:
            return ReaderOutput()
        self._begin("")
        if self._step == self._in_value and self._is_settled_by_end():
            earlier = self._outbox.end("")
            more = self.feed("")
            last = more if more.rest is not None else self.finish(truncated=False)
            others = () if last is more else more.deltas
            return replace(last, deltas=(*earlier, *others, *last.deltas))
        is_between = self._step in (self._after_json, self._at_call_end) or (
            self._step == self._between_parameters and not self._lacks_arguments(self._name)
        )
        if is_between and self._dialect.may_end_with(self._buffer.strip()):
            self._end_call(0)
        is_text = self._is_open
        deltas = self._outbox.end("")
        return ReaderOutput(deltas, rejected=self.held if is_text else "")

    @property
    def _has_begun_next(self) -> bool:
        is_between = self._step == self._before_call and not self._is_over
        return is_between and not self._dialect.may_end_with(self._buffer.strip())

    def _is_settled_by_end(self) -> bool:
        """Tell whether a value has ended, or is no JSON, because nothing else follows."""
        if self._strings:
            # A quote is missing.
            self._strings = None
            return True
        start = self._doubt.read
        end = REFUTED if self._inner_open or self._doubt.depth else self._closer_at(start)
        if end < 0 and self._doubt.end is not None and not self._is_mentioned(self._doubt.end):
            start, end = 0, self._doubt.end
        if end >= 0:
            self._end_value(self._without_padding(start, end), end)
            self._buffer = self._buffer[end:]
        return end >= 0

    def _is_mentioned(self, position: int) -> bool:
        """Tell whether the line goes on after the end of a block, which is then none."""
        end = self._block_end_at(position)
        rest = self._buffer[end:].partition("\n")[0].strip() if end >= 0 else ""
        return bool(rest) and not rest.startswith(self._context.opener.strip())

    def _before_call(self, position: int) -> int:
        position = self._after_strays(position)
        if position < 0:
            return position
        call = self._next_call_at(position)
        if call.end >= 0:
            self._open_call(call)
            return call.end
        end = self._block_end_at(position) if self._calls_ended else REFUTED
        self._is_over = end >= 0
        return self._expected(position, end, call.end)

    def _after_strays(self, position: int) -> int:
        """Return the position after whitespace and repeated tags."""
        if not self._is_in_block:
            return self._skip_space(position)
        ends = (*self._dialect.call_ends, *self._dialect.other_parameter_ends)
        strays = ends if self._calls_ended else (self._context.opener,)
        found = self._skip_strays(position, strays)
        return self._skip_space(position) if found == REFUTED else found

    def _open_call(self, call: Match) -> None:
        self._types = self._context.calls.parameter_types(call.name)
        self._odd_parameter = self._dialect.odd_parameter(tuple(self._types.names))
        self._given.clear()
        self._beside = {k: v for k, v in call.attributes.items() if k in self._types.names}
        self._name = call.name
        self._missing_end = "{}"
        is_whole = call.is_closed and self._types.required <= self._beside.keys()
        self._step = self._after_closed_call if is_whole else self._between_parameters

    def _after_closed_call(self, position: int) -> int:
        """End a call whose tag is also its own end."""
        self._end_call(position)
        self._is_over = not self._dialect.block_ends
        return position

    def _end_call(self, end: int) -> None:
        self._hand_out_name(end)
        self._give_beside(end)
        super()._end_call(end)

    def _give_beside(self, end: int) -> None:
        """Emit the arguments that stand beside the name, unless tags have given them."""
        for key, text in self._beside.items():
            if key not in self._given:
                self._begin_argument(json_string(key), end)
                value = ValueWriter(self._types.of(key), repaired_value)
                self._send(value.write(text) + value.end(), end)
        self._beside = {}

    def _between_parameters(self, position: int) -> int:
        position = self._skip_space(position)
        stray = self._any_at(position, self._value_ends if self._given else ())
        if stray != REFUTED:
            return stray
        parameter = self._parameter_at(position)
        if parameter.end >= 0:
            self._begin_value(parameter)
            return parameter.end
        again = self._call_again_at(position) if self._name else REFUTED
        if again >= 0:
            return again
        json_start = self._json_at(position) if self._missing_end == "{}" else REFUTED
        if json_start >= 0:
            self._beside = {}
            self._json = JsonArguments()
            self._step = self._in_json
            return json_start
        return self._end_call_at(position, either(parameter.end, json_start))

    def _call_again_at(self, position: int) -> int:
        """Match the beginning of the call once more, perhaps with the opener of its block."""
        call, block = self._next_call_at(position), self._next_block_at(position)
        again = call if call.end >= 0 else block
        return again.end if again.end >= 0 and again.name == self._name else REFUTED

    def _json_at(self, position: int) -> int:
        """Return the start of a JSON object that replaces all parameters."""
        if self._dialect.json_begin is not None:
            tag = self._dialect.json_begin.match(self._buffer, position)
            position = after_space(self._buffer, tag.end) if tag.end >= 0 else tag.end
        if position < 0:
            return position
        begin = after(self._buffer, position, "{")
        return position if begin >= 0 else begin

    def _end_call_at(self, position: int, otherwise: int = REFUTED) -> int:
        """Consume the end of a call: its tag, or else the end of the block or the next call."""
        end = self._any_at(position, self._dialect.call_ends)
        if end == REFUTED:
            follows = either(
                self._block_end_at(position),
                self._next_call_at(position).end,
                self._next_block_at(position).end,
            )
            end = min(position, follows)
        if end >= 0:
            is_whole = self._types.required <= self._beside.keys()
            if self._context.in_prose and self._name and not is_whole:
                # A sentence names the tool.
                raise NotACallError(position)
            self._end_call(end)
            self._is_over = not self._dialect.block_ends
        return self._expected(position, end, otherwise)

    def _begin_value(self, parameter: Match) -> None:
        dialect, name = self._dialect, parameter.name
        self._hand_out_name(parameter.end)
        self._begin_argument(json_string(name), parameter.end)
        self._given.add(name)
        self._value = self._new_value(parameter)
        # Such a value never contains a tag, unlike a string.
        self._is_scalar = UNKNOWN < self._types.of(name) <= SCALARS
        self._strings = JsonStrings() if self._is_json(parameter) else None
        end = dialect.parameter_end.replace(ELEMENT_NAME, parameter.tag)
        self._element = name if dialect.has_element_ends else ""
        own_ends = (f"</{name}>",) if self._element and parameter.tag else ()
        self._value_ends = (*own_ends, end, *dialect.other_parameter_ends)
        if parameter.is_closed or _VALUE_KEY in parameter.attributes:
            text = parameter.attributes.get(_VALUE_KEY, "")
            self._send(self._value.write(text) + self._value.end(), parameter.end)
            return
        has_elements = dialect.make_value is not None and self._types_of(parameter) != STRING
        self._inner_begin = end.replace("/", "", 1) if has_elements else ""
        self._inner_open = 0
        self._doubt = _DoubtfulEnd()
        self._may_lack_end = not has_elements
        self._verbatim_end = ""
        self._step = self._before_value

    def _new_value(self, parameter: Match) -> ValueWriter:
        if self._dialect.make_value:
            return self._dialect.make_value(self._types, parameter.name)
        types, declared = self._types_of(parameter), self._types.of(parameter.name)
        is_text = declared == STRING != types
        return ValueWriter(types, text_value if is_text else repaired_value)

    def _types_of(self, parameter: Match) -> JsonTypes:
        declared, types = self._types.of(parameter.name), self._dialect.types
        written = types.get(parameter.kind or "")
        return declared if written is None else agreed_types(written, declared)

    def _is_json(self, parameter: Match) -> bool:
        """Tell whether a value is JSON, and cannot be text that looks like it."""
        types = self._types_of(parameter)
        is_nested = self._dialect.make_value is not None
        return bool(types) and "string" not in types and not (is_nested or self._is_scalar)

    def _before_value(self, position: int) -> int:
        """Skip a repeated tag before the value."""
        begin = self._dialect.value_begin
        again = after(self._buffer, position, begin) if begin else self._tag_again_at(position)
        if again == REFUTED:
            self._step = self._at_value
        return position if again == REFUTED else again

    def _tag_again_at(self, position: int) -> int:
        """Match the tag of the argument once more; an element may contain one of its name."""
        line = self._line_at(position)
        if self._inner_begin or line == len(self._buffer):
            return REFUTED if self._inner_begin else UNDECIDED
        again = self._marked_at(line)
        is_other = again.end >= 0 and json_string(again.name) != self._keys[-1]
        return REFUTED if is_other else again.end

    def _at_value(self, position: int) -> int:
        """Skip text before a value that is not part of it."""
        if position == len(self._buffer):
            return UNDECIDED
        begin, end = self._dialect.verbatim
        verbatim = after(self._buffer, self._skip_space(position), begin) if begin else REFUTED
        if verbatim == UNDECIDED:
            return verbatim
        line = self._line_at(position) if self._dialect.pads_values else position
        self._padding = self._buffer[position:line]
        if self._padding == "\r":
            return UNDECIDED
        self._step = self._in_value
        if verbatim == REFUTED:
            return line
        self._verbatim_end = end
        self._value_ends = (end, *self._value_ends)
        self._may_lack_end = False
        return verbatim

    def _in_value(self, position: int) -> int:
        """Emit the value up to its end, or to where it may end."""
        start, end = self._find_value_end(position)
        if end >= 0:
            self._end_value(start, end, position)
            return end
        if start == position:
            return UNDECIDED
        self._send(self._value.write(self._buffer[position:start]), start)
        if self._strings:
            self._strings.take(start - position)
        return start

    def _find_value_end(self, position: int) -> tuple[int, int]:
        """Return where the value may end, and the end of its end tag if known."""
        if self._strings and (found := self._find_json_end(position, self._strings)):
            return found
        self._strings = None
        return self._find_text_end(position)

    def _find_text_end(self, position: int) -> tuple[int, int]:
        """Return the same for text: where the calls in it are closed, or else its first end."""
        doubt, place = self._doubt, position + self._doubt.read
        while found := self._candidates().search(self._buffer, place):
            start = found.start()
            place = self._pass_call(start)
            if place >= 0:
                continue
            end = self._value_end_at(start) if place == REFUTED else UNDECIDED
            is_doubtful = end == REFUTED or self._lacks_end_at(start)
            end = self._doubtful_end_at(start) if end == REFUTED else end
            place = found.end()
            if end == UNDECIDED:
                return self._wait_at(position, start)
            if end >= 0 and not (doubt.depth or is_doubtful):
                return self._without_padding(start, end), end
            if end >= 0 and doubt.end is None:
                doubt.end, position = end - start, start
        return self._wait_at(position, len(self._buffer))

    def _lacks_end_at(self, start: int) -> bool:
        """Tell whether the end of a value is not the one that it must have."""
        if self._verbatim_end:
            return self._any_at(self._line_at(start), (self._verbatim_end,)) < 0
        return self._dialect.requires_ends and self._closer_at(start) < 0

    def _wait_at(self, position: int, start: int) -> tuple[int, int]:
        """Read on from a place once there is more text; text since an end of the value waits."""
        if self._doubt.end is None:
            return start, UNDECIDED
        self._doubt.read = start - position
        return position, UNDECIDED

    def _pass_call(self, start: int) -> int:
        """Match the beginning of a call inside a text, with its first argument, or its end."""
        if self._is_scalar or self._inner_begin:
            return REFUTED
        line = self._line_at(start)
        call_end = self._dialect.call_ends[0]
        end = after(self._buffer, line, call_end) if self._doubt.depth else REFUTED
        if end != REFUTED:
            self._doubt.depth -= end >= 0
            return end
        begin = first_match(self._buffer, line, self._dialect.call, self._dialect.quoted_call).end
        inside = after_space(self._buffer, begin) if begin >= 0 else begin
        if inside < 0:
            return inside
        parameter = (self._odd_parameter, self._dialect.parameter, self._dialect.quoted_parameter)
        argument = first_match(self._buffer, inside, *parameter).end
        goes_on = either(argument, after(self._buffer, inside, call_end))
        self._doubt.depth += goes_on >= 0
        return begin if goes_on >= 0 else goes_on

    def _find_json_end(self, position: int, strings: JsonStrings) -> tuple[int, int] | None:
        """Return the same for a value in JSON, and nothing if it is not JSON after all."""
        begin = position + strings.read
        for candidate in self._candidates().finditer(self._buffer, begin):
            start = candidate.start()
            is_quoted = strings.quotes(self._buffer[begin:start])
            begin = start
            if strings.is_broken:
                return None
            end = REFUTED if is_quoted else self._value_end_at(start)
            if end != REFUTED:
                sure = start if end >= 0 else min(start, position + strings.sure)
                return self._without_padding(sure, end), end
        strings.read_on(self._buffer[begin:])
        return None if strings.is_broken else (position + strings.sure, UNDECIDED)

    def _without_padding(self, start: int, end: int) -> int:
        """Return the true end of a value whose end may begin with a newline.

        The newline belongs to a closing tag only if the opening one has its own.
        """
        line = self._line_at(start)
        if end < 0 or line in (start, end):
            return start
        is_longer = line - start > len(self._padding)
        return line - len(self._padding) if is_longer else start

    def _value_end_at(self, start: int) -> int:
        """Return the end of the value's end tag, if the value ends here."""
        end = self._closer_at(start)
        if self._inner_begin and (inner := self._inner_at(start, end)):
            return inner
        if end < 0:
            return either(end, self._element_end_at(start), self._bare_end_at(start))
        position = end if self._is_scalar else self._after_ends(end)
        if self._is_scalar or position < 0:
            return position
        follows = either(
            self._next_parameter_at(position),
            self._end_of_call_at(position),
            self._block_end_at(position),
            self._next_call_at(position).end,
            self._next_block_at(position).end,
        )
        return end if follows >= 0 else follows

    def _after_ends(self, end: int) -> int:
        """Return the position after the end of a value, and others of its tags."""
        return self._skip_strays(end, self._value_ends[bool(self._verbatim_end) :])

    def _doubtful_end_at(self, start: int) -> int:
        """Return an end that something else may refute.

        It is that of the value's end tag, if the end of the call follows, or before that of a
        block.
        """
        end = self._closer_at(start)
        position = self._after_ends(end) if end >= 0 else end
        if position >= 0 and self._any_at(position, self._dialect.call_ends) >= 0:
            return end
        line = self._line_at(start)
        may_be_last = self._may_lack_end and self._is_in_block
        return min(line, self._block_end_at(line)) if may_be_last else REFUTED

    def _inner_at(self, start: int, end: int) -> int:
        """Follow an element inside the value with its name; zero if neither end of one is here.

        The end of an element before that of the call is the value's own.
        """
        line = self._line_at(start)
        begin = after(self._buffer, line, self._inner_begin)
        if begin != REFUTED:
            self._inner_open += begin >= 0
            return min(begin, REFUTED)
        if not self._inner_open or end < 0:
            return 0
        follows = after_space(self._buffer, end)
        last = self._end_of_call_at(follows) if follows >= 0 else follows
        self._inner_open -= last == REFUTED
        return end if last >= 0 else last

    def _element_end_at(self, start: int) -> int:
        """Return the end of an end tag named after the argument, if no such tag is in the value."""
        line = self._line_at(start)
        begin = after(self._buffer, line, f"<{self._element}") if self._element else REFUTED
        if begin >= 0:
            self._element = ""
        if begin != REFUTED or not self._element:
            return min(begin, REFUTED)
        end = after(self._buffer, line, f"</{self._element}>")
        position = after_space(self._buffer, end) if end >= 0 else end
        if position < 0:
            return position
        follows = either(self._marked_at(position).end, self._end_of_call_at(position))
        return end if follows >= 0 else follows

    def _line_at(self, position: int) -> int:
        """Return the position after a line break, or the same; one may have begun."""
        return span_end(_MAYBE_LINE, self._buffer, position)

    def _bare_end_at(self, start: int) -> int:
        """Return the end of a value that lacks its end tag.

        It ends before a parameter (on a new line, unless parameters have two tags), and before
        anything that ends a block.
        """
        if not self._may_lack_end:
            return REFUTED
        line = self._line_at(start)
        dialect = self._dialect
        may_follow = (
            line > start or dialect.value_begin or dialect.requires_ends or dialect.is_inline
        )
        follows = either(
            self._next_parameter_at(line, is_bare=True) if may_follow else REFUTED,
            self._end_of_call_at(line) if self._is_in_block else self._last_end_at(line),
        )
        return line if follows >= 0 else follows

    def _last_end_at(self, position: int) -> int:
        """Match the end of a call followed by the next one or by the end of a block."""
        end = self._any_at(position, self._dialect.call_ends)
        position = after_space(self._buffer, end) if end >= 0 else end
        if position < 0:
            return position
        next_call = either(self._next_call_at(position).end, self._damaged_call_at(position))
        return either(self._block_end_at(position), next_call)

    def _closer_at(self, start: int) -> int:
        line = self._line_at(start)
        return self._any_at(line, self._value_ends)

    def _candidates(self) -> re.Pattern[str]:
        dialect = self._dialect
        ends: tuple[str, ...] = ()
        if self._verbatim_end:
            # Calls in the text, which it may contain whole.
            ends = (dialect.call_begin,)
        elif self._may_lack_end:
            ends = (dialect.call_ends[0], dialect.parameter_begin)
        return _places(frozenset(text[0] for text in (*self._value_ends, *ends)))

    def _marked_at(self, position: int) -> Match:
        found = first_match(self._buffer, position, self._odd_parameter, self._dialect.parameter)
        name = found.name.strip()
        is_padded = name != found.name and not self._types.is_declared(found.name)
        return replace(found, name=name) if is_padded and self._types.is_declared(name) else found

    def _parameter_at(self, position: int) -> Match:
        found = self._marked_at(position)
        is_odd = found.end >= 0 and not self._types.is_declared(found.name)
        if found.end != REFUTED and not is_odd:
            return found
        others = (*self._dialect.other_parameters, self._dialect.unopened_parameter)
        other = first_match(self._buffer, position, *others)
        if other.end >= 0 and not self._is_due(other.name):
            other = NO_MATCH
        if other.end == REFUTED:
            other = self._nameless_at(position)
        return found if is_odd and other.end < 0 else other

    def _nameless_at(self, position: int) -> Match:
        """Match a tag without a name: that of the only required argument that is left."""
        due = self._types.required - self._given
        nameless = self._dialect.nameless_parameter if len(due) == 1 else None
        found = nameless.match(self._buffer, position) if nameless else NO_MATCH
        return replace(found, name=next(iter(due))) if found.end >= 0 else found

    def _is_due(self, name: str) -> bool:
        return self._types.is_declared(name) and name not in self._given

    def _next_parameter_at(self, position: int, *, is_bare: bool = False) -> int:
        parameter = self._marked_at(position) if is_bare else self._parameter_at(position)
        if parameter.end < 0 or not is_bare:
            return parameter.end
        is_due = self._is_due(parameter.name)
        return self._unless_mentioned(position, parameter) if is_due else REFUTED

    def _unless_mentioned(self, position: int, parameter: Match) -> int:
        """Return the end of a parameter's tags before which a value lacks its end.

        Text may mention them: without the tag of a value within a line, or if they come again.
        """
        tags, value_begin = self._buffer[position : parameter.end], self._dialect.value_begin
        is_whole = tags.rstrip().endswith(value_begin)
        if not (is_whole or self._buffer.startswith("\n", position - 1)):
            return REFUTED
        after_name = tags.find(parameter.name) + len(parameter.name)
        limit = position + _MAX_MENTION_CHARS
        again = self._buffer.find(tags[: after_name + 1], parameter.end, limit)
        over = self._buffer.find(self._dialect.call_ends[0], parameter.end, limit)
        if again >= 0 and not 0 <= over < again:
            return REFUTED
        is_open = over < 0 and len(self._buffer) < limit
        return UNDECIDED if is_open else parameter.end

    def _end_value(self, start: int, end: int, position: int = 0) -> None:
        piece = self._value.write(self._buffer[position:start])
        self._send(piece + self._value.end(), end)
        self._step = self._between_parameters

    def _in_json(self, position: int) -> int:
        if position == len(self._buffer):
            return UNDECIDED
        piece, end = self._json.read_from(self._buffer, position)
        if piece:
            self._hand_out_name(end)
            self._send(piece, end - self._json.kept_back)
        if self._json.is_malformed:
            raise NotACallError(end)
        if self._json.is_whole:
            self._missing_end = self._json.missing_end
            self._step = self._after_json
        return end

    def _after_json(self, position: int) -> int:
        """Consume the end tag of a JSON object; it may be missing."""
        position = self._skip_space(position)
        end = after(self._buffer, position, self._dialect.json_end)
        if end == UNDECIDED:
            return UNDECIDED
        self._step = self._at_call_end
        return max(position, end)

    def _at_call_end(self, position: int) -> int:
        return self._end_call_at(self._skip_space(position))


@lru_cache
def _places(first: frozenset[str]) -> re.Pattern[str]:
    """Return a pattern for the places where a value may end: before one of these characters."""
    chars = "".join(map(re.escape, sorted(first)))
    return re.compile(rf"(?:\r?\n)?[{chars}]|\r?\n\Z|\r\Z")
