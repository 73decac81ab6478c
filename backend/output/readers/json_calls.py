"""Reads calls whose arguments are JSON: after their names, or both in an object."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from backend.formats.dialects import KEYS_BESIDE, LIST_KEY, NAME_KEYS, NESTING_KEYS
from backend.output.readers.json_scanner import SURROGATE, JsonScanner, JsonState, call_ends
from backend.output.readers.patterns import (
    MAX_TAG_CHARS,
    NO_MATCH,
    REFUTED,
    SPACE,
    UNDECIDED,
    Pattern,
    Piece,
    after,
    choice,
    fixed,
    sequence,
    spaced,
    span_end,
)
from backend.output.readers.reader import (
    CallLedger,
    NotACallError,
    Outbox,
    ReaderContext,
    ReaderOutput,
    SteppingReader,
    is_nameless,
)
from backend.output.readers.tolerant_json import object_inside
from backend.output.readers.typed_values import describes_arguments

FENCE = "```"
# Arguments in a list, or a list of none; other brackets may begin a marker.
LISTED = sequence(fixed("["), SPACE, choice(fixed("]"), fixed("{")))
_BEGIN = choice(*map(fixed, ("{", '"', "n", "N")), LISTED)
_WHOLE, _BEGUN = re.compile(_BEGIN.whole), re.compile(_BEGIN.begun)
_SPACE = re.compile(r"\s*")
_DIGIT = "[0-9a-fA-F]"
_HIGH, _LOW = rf"u[dD][89abAB]{_DIGIT}{{2}}", rf"u[dD][c-fC-F]{_DIGIT}{{2}}"
_ESCAPE = re.compile(rf"""\\(?:{_HIGH}\\{_LOW}|u{_DIGIT}{{4}}|["\\/bfnrt])""")
_BEGUN_ESCAPE = re.compile(rf"\\(?:u{_DIGIT}{{0,3}}|{_HIGH}(?:\\(?:u{_DIGIT}{{0,3}})?)?)?\Z")


class JsonArguments:
    """Reads an object, perhaps in a JSON string or alone in a list, or `null` or `[]` for none.

    Nothing is emitted before a value in it has begun, which proves that it is an object.

    The last brace is held back: the reader of the call knows when the call is complete.
    """

    def __init__(self, ends: tuple[str, ...] = ()) -> None:
        """Begin before the arguments; strings that lack their quotes end before one of `ends`."""
        self._scanner = JsonScanner(call_ends(ends))
        self._has_begun = False
        self._is_object = False
        self._wrapped: list[str] = []
        self._doubtful: list[str] = []
        self.is_whole = False
        self.is_malformed = False
        self.missing_end = "{}"

    @staticmethod
    def begin_at(text: str, position: int) -> int:
        """Return the position, if they may begin there, `UNDECIDED` or `REFUTED`."""
        if _WHOLE.match(text, position):
            return position
        return UNDECIDED if _BEGUN.fullmatch(text, position) else REFUTED

    @property
    def is_listed(self) -> bool:
        """Whether they are alone in a list."""
        return "".join(self._wrapped[:1]).startswith("[")

    @property
    def is_empty(self) -> bool:
        """Whether they are complete, and an object without members."""
        return self.is_whole and self.missing_end.lstrip().startswith("{")

    @property
    def kept_back(self) -> int:
        """Number of latest characters read but not emitted."""
        return 1 if self.is_whole else self._scanner.pending

    def read_from(self, text: str, position: int) -> tuple[str, int]:
        """Return a piece to emit, and the position after the arguments or at an error."""
        if not self._has_begun:
            if text[position].isspace():
                return "", position + 1
            self._begin(text[position])
        if self.is_malformed:
            return "", position
        piece, position = self._scanner.read_from(text, position)
        self.is_whole = self._scanner.state is JsonState.COMPLETE
        self.is_malformed = self._scanner.state is JsonState.MALFORMED
        if not self._is_object:
            piece = self._unwrap(piece)
        if self.is_whole:
            piece, self.missing_end = piece[:-1], piece[-1]
        return self._certain(piece), position

    def finish(self) -> None:
        """End the text: a `null` is whole, and no longer the beginning of another word."""
        if self._has_begun and not (self._is_object or self.is_whole):
            self.read_from(" ", 0)

    def _certain(self, piece: str) -> str:
        """Return a piece, with those before it, once they are certain to be arguments."""
        self._doubtful.append(piece)
        text = "".join(self._doubtful)
        if self.is_whole and text.strip() == "{":
            # An empty object is not emitted before the call is complete.
            self.missing_end = text + self.missing_end
            return ""
        if not (self.is_whole or self._scanner.has_value):
            return ""
        self._doubtful.clear()
        return text

    def _begin(self, char: str) -> None:
        self._has_begun = True
        self._is_object = char == "{"
        self.is_malformed = char not in '{["nN'

    def _unwrap(self, piece: str) -> str:
        """Return the object inside a complete value."""
        self._wrapped.append(piece)
        unwrapped = object_inside("".join(self._wrapped)) if self.is_whole else ""
        self.is_malformed |= self.is_whole and not unwrapped
        self.is_whole = bool(unwrapped)
        return unwrapped


_Step: TypeAlias = Callable[[str, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHead:
    """The text between the start of a call and its arguments.

    Attributes:
        patterns: The ways to write it; the first match wins. A pattern may end before the brace
            that begins the arguments.
        odd: Other patterns, for those of some names that need their own.
        loose: A head in which any word is the id, in formats whose ids contain the name.
        lead_ins: Meaningless texts, one of which may follow; longer ones first.
    """

    patterns: tuple[Pattern, ...]
    odd: Callable[[tuple[str, ...]], tuple[Pattern, ...]]
    loose: Pattern | None = None
    lead_ins: tuple[str, ...] = ()


class _NamedCall:
    """Reads a call from the text after its start to the end of its arguments.

    The name is emitted with the first of the arguments, which are emitted as they arrive. A call
    without arguments has `{}`.
    """

    def __init__(
        self, calls: CallLedger, outbox: Outbox, *, head: CallHead, ends: tuple[str, ...] = ()
    ) -> None:
        self._calls = calls
        self._outbox = outbox
        self._head = head
        self._step: _Step = self._in_head
        self._name = self._id = ""
        self._is_nameless = False
        self._unsent = ""
        self._has_lead_in = False
        self._arguments = JsonArguments(ends)
        self.is_over = False

    @property
    def is_whole(self) -> bool:
        return self._arguments.is_whole

    def finish(self) -> bool:
        """End the text; tell whether the call is complete: arguments may be missing."""
        self._arguments.finish()
        if self.is_over or self._is_nameless:
            return self.is_over
        if self._step != self._before_arguments:
            return self.is_whole
        return not (self._has_lead_in or self._calls.lacks_arguments(self._name, "{}"))

    def read(self, text: str, position: int) -> int:
        """Return the position after the consumed text, or a negative number if more is needed.

        Raises:
            NotACallError: The text is not a call; emitted deltas stand.
        """
        return self._step(text, position)

    def close(self, settled: int) -> None:
        """Emit the rest of a call that ends here."""
        self._send(self._arguments.missing_end, settled)
        self._calls.complete()

    def _send(self, piece: str, settled: int) -> None:
        """Emit a piece of the arguments; the first piece begins the call."""
        if self._is_nameless:
            self._unsent += piece
            return
        if self._name:
            self._outbox.send(self._calls.open(self._name, self._id), settled)
            self._name = ""
        self._outbox.send(self._calls.extend(piece), settled)

    def _in_head(self, text: str, position: int) -> int:
        for pattern in (*self._head.odd(self._calls.names), *self._head.patterns):
            found = pattern.match(text, position)
            if found.end == UNDECIDED:
                return UNDECIDED
            if found.end >= 0 and self._calls.is_offered(found.name):
                self._name, self._id = found.name, found.call_id
                self._step = self._before_arguments
                return found.end
        return self._in_loose_head(text, position)

    def _in_loose_head(self, text: str, position: int) -> int:
        """Read an id in another form; without a name in it, the arguments tell the tool."""
        found = self._head.loose.match(text, position) if self._head.loose else NO_MATCH
        if found.end == UNDECIDED:
            return UNDECIDED
        self._name = self._calls.name_in_id(found.name)
        if found.end < 0 or not (self._name or is_nameless(found.name)):
            raise NotACallError(position)
        self._name = self._name or self._calls.only_name
        self._is_nameless = not self._name
        self._step = self._before_arguments
        return found.end

    def _before_arguments(self, text: str, position: int) -> int:
        start = span_end(_SPACE, text, position)
        if start > position:
            return start
        if position == len(text):
            return UNDECIDED
        begin = self._arguments.begin_at(text, position)
        if begin != REFUTED:
            self._step = self._in_arguments if begin >= 0 else self._step
            return begin
        if self._has_lead_in:
            return self._at_end_of_fence(text, position)
        ends = (after(text, position, lead_in) for lead_in in self._head.lead_ins)
        end = next((end for end in ends if end != REFUTED), REFUTED)
        if end == REFUTED:
            self._find_name(position)
            self.is_over = True
            return position
        self._has_lead_in = end >= 0
        return end

    def _at_end_of_fence(self, text: str, position: int) -> int:
        """End a call without arguments: their fence is empty."""
        end = after(text, position, FENCE)
        if end == REFUTED:
            raise NotACallError(position)
        if end >= 0:
            self._find_name(position)
            self.is_over = True
        return end

    def _in_arguments(self, text: str, position: int) -> int:
        if position == len(text):
            return UNDECIDED
        piece, position = self._arguments.read_from(text, position)
        if piece:
            self._send(piece, position - self._arguments.kept_back)
        if self._arguments.is_malformed:
            raise NotACallError(position)
        if self._arguments.is_whole:
            self._find_name(position)
            self.is_over = True
        return position

    def _find_name(self, position: int) -> None:
        """Choose the only tool that takes the arguments, if the call has no name."""
        if not self._is_nameless:
            return
        keys = json.loads(self._unsent + self._arguments.missing_end).keys()
        self._name, *others = (*self._calls.names_fitting(keys), "")
        if not self._name or len(others) > 1:
            raise NotACallError(position)
        self._is_nameless = False
        if self._unsent:
            self._send(self._unsent, position - 1)


_MAX_KEY_CHARS = 64
_MAX_ID_CHARS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKeys:
    """The keys of the parts of a call."""

    names: tuple[str, ...] = NAME_KEYS
    arguments: tuple[str, ...] = ("arguments", "parameters")
    ids: tuple[str, ...] = ()


# The first xLAM writes a thought before its list of calls.
_KEYS_BESIDE = (*KEYS_BESIDE, "thought")

# The types, as JSON, that an object without arguments may have; with another it is a record.
_CALL_TYPES = (
    "",
    *(f'"{kind}"' for kind in ("function", "function_call", "tool_call", "tool_use")),
)


class _ObjectCall:
    """Reads the object after its opening brace, keys in any order.

    The name is emitted as soon as it is known to be offered; arguments are emitted as they arrive,
    as the model wrote them. A later id is emitted at the end and replaces the one that the call was
    given.

    Also accepted: arguments as an object inside a JSON string, a doubled first brace, name and
    arguments one level deeper, under `function`, and an object around a list of calls. An object
    without arguments is a call only if none of its content could be meant as arguments.

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

        A doubtful object may be something else. It is a call only if the name comes first and only
        arguments follow, and nothing is emitted before they begin.
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
        self._type = ""
        self._strangers: set[str] = set()
        self._arguments = JsonArguments(ends)
        self._unsent: list[str] = []
        self.is_over = False

    @property
    def is_whole(self) -> bool:
        return self.is_over

    def finish(self) -> bool:
        return self.is_over or self._may_lack_brace

    def read(self, text: str, position: int) -> int:
        return self._step(text, position) if position < len(text) else UNDECIDED

    def close(self, settled: int) -> None:
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
        if self._key == LIST_KEY and self._is_blank:
            return self._before_list
        if self._key in self._keys.ids:
            self._id_pieces = []
            return self._in_id
        if self._key in self._keys.arguments and (self._is_named or not self._is_doubtful):
            if self._has_arguments:
                raise NotACallError(position)
            self._has_arguments = True
            has_schema = self._is_doubtful or self._calls.parameter_types(self._name).names
            return self._before_arguments if has_schema else self._in_arguments
        if self._key not in _KEYS_BESIDE:
            self._strangers.add(self._key)
            if self._is_doubtful and not self._is_open:
                raise NotACallError(position)
        return self._in_other_value

    @property
    def _is_blank(self) -> bool:
        """Whether no member has been read, so that the object may be one around a list of calls."""
        return not (self._is_named or self._has_arguments or self._type or self._strangers)

    def _before_list(self, text: str, position: int) -> int:
        """Begin again with the first call in a list."""
        char = text[position]
        if char == "{":
            self._key = ""
            self._step = self._before_key
        elif not (char.isspace() or char == "["):
            raise NotACallError(position)
        return position + 1

    def _in_other_value(self, text: str, position: int) -> int:
        piece, position = self._scanner.read_from(text, position)
        self._type += piece if self._key == "type" else ""
        self._follow_scanner(position)
        return position

    def _in_id(self, text: str, position: int) -> int:
        piece, position = self._scanner.read_from(text, position)
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
        has_parts = self._is_named and self._arguments.is_whole
        return has_parts and not (self._is_doubtful or self._is_nested)

    @property
    def _is_complete(self) -> bool:
        """Whether a named object is a call; without a marker it needs the required arguments."""
        if not (self._is_doubtful or self._has_arguments or self._strangers):
            # Models write them in an object of their own after this one.
            return not self._calls.lacks_arguments(self._name, "{}")
        if self._has_arguments or not self._is_doubtful:
            return self._has_values or not self._strangers
        is_record = self._id or self._type.strip() not in _CALL_TYPES
        return not (is_record or self._calls.lacks_arguments(self._name, "{}"))

    @property
    def is_lone_name(self) -> bool:
        """Whether an object without a marker has no arguments: a list of such ones is data."""
        return self._is_doubtful and not self._has_arguments

    @property
    def _has_values(self) -> bool:
        """Whether there are arguments, or an empty object and no other members that fit."""
        if not (self._strangers and self._arguments.is_empty):
            return self._has_arguments
        types = self._calls.parameter_types(self._name)
        return not (self._strangers <= {*types.names} and types.fit(self._strangers))

    def _end_object(self, position: int) -> None:
        if self._is_nested:
            self._is_nested = False
            self._step = self._after_value
        elif self._is_named and self._is_complete:
            self.is_over = True
        else:
            raise NotACallError(position)

    def _before_name(self, text: str, position: int) -> int:
        char = text[position]
        if char == '"':
            self._step = self._in_name
        elif char == "{" and self._key in NESTING_KEYS and not self._is_nested:
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
            return position + 1
        if _BEGUN_ESCAPE.match(text, position):
            return UNDECIDED
        escape = _ESCAPE.match(text, position)
        written = json.loads(f'"{escape[0]}"') if escape else char
        is_text = bool(escape and not SURROGATE.search(written)) or char not in '"\\'
        if not (is_text and self._calls.may_become_offered(self._name + written)):
            raise NotACallError(position)
        self._name += written
        return escape.end() if escape else position + 1

    def _open(self, settled: int) -> None:
        if not self._is_open:
            self._is_open = True
            self._given_id = self._id
            self._outbox.send(self._calls.open(self._name, self._id), settled)

    def _before_arguments(self, text: str, position: int) -> int:
        """Begin arguments, unless they describe those of the tool."""
        types = self._calls.parameter_types(self._name)
        is_schema = describes_arguments(text, position, types)
        if is_schema:
            raise NotACallError(position)
        if is_schema is None:
            return UNDECIDED
        self._step = self._before_arguments if text[position].isspace() else self._in_arguments
        return position + text[position].isspace()

    def _in_arguments(self, text: str, position: int) -> int:
        piece, position = self._arguments.read_from(text, position)
        if self._is_doubtful and self._arguments.is_listed and not self._fits(piece):
            raise NotACallError(position)
        self._send_arguments(piece, position - self._arguments.kept_back)
        if self._arguments.is_malformed:
            raise NotACallError(position)
        if self._arguments.is_whole:
            self._step = self._after_value
        return position

    def _fits(self, piece: str) -> bool:
        """Tell whether the object in a list, once it is whole, has the arguments of the tool."""
        if not self._arguments.is_whole:
            return True
        types = self._calls.parameter_types(self._name)
        return types.fit(json.loads(piece + self._arguments.missing_end).keys())

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


_BARE_OPENERS = ("{", "[")
_NAME = Piece(r'"[^"\\]{1,64}+"', r'"[^"\\]{0,64}+"?')
_LONE = sequence(spaced("{"), spaced('"name"'), spaced(":"), SPACE, _NAME, spaced("}"))
_LONE_NAME, _BEGUN_LONE_NAME = re.compile(_LONE.whole), re.compile(_LONE.begun)
_BRACKETS = frozenset(']}"')
_REMARK = re.compile(r"(?://|#)[^\n<]*+\s*+")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBlock:
    """The parts of a block of calls.

    Attributes:
        call: The shape of a call: an object with these keys, or a head before the arguments.
        call_start: The text that begins a call, also at the end of the opener. If empty, there is
            one call, right after the opener.
        call_end: The text that ends a call; if empty, its JSON ends it.
        starts: Texts that may precede the first call, such as a repeated opener.
        ends: Texts that end the block, if there are any.
        separators: Texts that may follow a call, and are plain text if no other call follows.
        fillers: Texts that may follow a call and are always meaningless.
    """

    call: CallKeys | CallHead
    call_start: str = ""
    call_end: str = ""
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    separators: tuple[str, ...] = ()
    fillers: tuple[str, ...] = ()

    @property
    def all_ends(self) -> tuple[str, ...]:
        """Texts longer than a bracket or quote that end arguments, a call or the block."""
        fillers = (filler for filler in self.fillers if filler not in _BRACKETS)
        return tuple(filter(None, (self.call_end, *self.ends, *fillers)))


class CallBlockReader(SteppingReader):
    """Reads one block, from its opener to its end or to text that is not a call.

    A call with an end marker is complete when that marker, or anything else, follows its JSON.

    Without a marker before it, and inside a thought, where a model may quote its instructions,
    an object is a call only if nothing in it contradicts that.
    """

    def __init__(
        self, context: ReaderContext, *, block: CallBlock, opener_is_call: bool = False
    ) -> None:
        super().__init__(context, opener_is_call=opener_is_call)
        self._block = block
        self._call = self._new_call()
        if context.opener.endswith(block.call_start):
            self._open_call()

    def finish(self, *, truncated: bool) -> ReaderOutput:
        """End; a missing end does no harm, and an unfinished call is text unless cut off."""
        if truncated:
            return ReaderOutput(rejected=self.held if self._is_in_answer else "")
        self._begin("")
        is_record = self._step == self._after_lone_name and self._buffer.strip()
        if self._is_in_call and self._call.finish() and not is_record:
            self._close_call(0)
        deltas = self._outbox.end("")
        return ReaderOutput(deltas, rejected=self.held if self.is_mid_call else "")

    @property
    def _is_in_answer(self) -> bool:
        """Whether a reply without a marker begins with a word that becomes no name."""
        word, *_ = (*self.held.split(maxsplit=1), "")
        is_first = not (self._context.opener or self._calls_ended)
        return is_first and not self._context.calls.may_become_offered(word)

    def _reject(self, text: str, position: int) -> ReaderOutput:
        """Give up before the end of the block."""
        is_data = self._step == self._after_lone_name
        if self._is_in_call and self._call.is_whole and not is_data:
            self._close_call(position)
        # Read again, the name of a tool would begin the same block.
        return super()._reject(text, max(position, self._unread_opener))

    def _before_call(self, position: int) -> int:
        start = self._skip_space(position)
        if start == len(self._buffer):
            return UNDECIDED
        marker, end = self._marker_at(start)
        if end == REFUTED and self._calls_begun and (after_it := self._after_remark(start)):
            return after_it
        if end == REFUTED:
            # A complete call ends before the whitespace after it.
            raise NotACallError(position if self._calls_begun else start)
        if end >= 0:
            self._pass_marker(marker, end)
        return end

    def _after_remark(self, position: int) -> int:
        """Return the position after a comment that ends the block; zero if there is none."""
        found = _REMARK.match(self._buffer, position, position + MAX_TAG_CHARS)
        if found is None or not self._block.ends:
            is_begun = self._block.ends and self._buffer[position:] == "/"
            return UNDECIDED if is_begun else 0
        if found.end() == len(self._buffer):
            return UNDECIDED
        ends = (after(self._buffer, found.end(), end) for end in self._block.ends)
        last = max(ends)
        return 0 if last == REFUTED else UNDECIDED if last == UNDECIDED else found.end()

    def _marker_at(self, position: int) -> tuple[str, int]:
        ends = {marker: self._after(position, marker) for marker in self._markers()}
        if UNDECIDED in ends.values():
            return "", UNDECIDED
        marker = max(ends, key=lambda marker: ends[marker], default="")
        return marker, ends.get(marker, REFUTED)

    def _after(self, position: int, marker: str) -> int:
        """Match a marker; a fence with a language after it does not end one but begins another."""
        if marker == FENCE and self._context.in_fence:
            return REFUTED
        end = after(self._buffer, position, marker)
        if end < 0 or marker != FENCE or not self._calls_begun:
            return end
        if end == len(self._buffer):
            return UNDECIDED
        return REFUTED if self._buffer[end].isalpha() else end

    def _markers(self) -> tuple[str, ...]:
        block = self._block
        if self._calls_begun:
            call_end = (block.call_end,) if self._is_in_call else ()
            others = (*call_end, *block.ends, *block.separators, *block.fillers)
        else:
            others = (*block.starts, self._context.opener)
        return tuple(filter(None, (block.call_start, *others)))

    def _pass_marker(self, marker: str, end: int) -> None:
        block = self._block
        if marker == block.call_start:
            if self._is_in_call:
                self._close_call(end - len(marker))
            self._open_call()
        elif marker == block.call_end or marker in block.ends:
            if self._is_in_call:
                self._close_call(end)
            self._is_over = marker in block.ends
        elif marker in block.fillers and not self._is_in_call:
            self._outbox.drop(end)

    def _open_call(self) -> None:
        self._calls_begun += 1
        self._call = self._new_call()
        self._step = self._in_call

    def _in_call(self, position: int) -> int:
        end = self._call.read(self._buffer, position)
        if self._call.is_over:
            is_first = self._context.opener in _BARE_OPENERS and not self._calls_ended
            if is_first and isinstance(self._call, _ObjectCall) and self._call.is_lone_name:
                self._step = self._after_lone_name
                return end
            self._step = self._before_call
            if self._call.is_whole and not self._block.call_end:
                self._close_call(end)
        return end

    def _after_lone_name(self, position: int) -> int:
        """Close the call of a tool without arguments, unless it is the first of several records.

        A list has no more calls, and another such object does not follow.
        """
        start = self._skip_space(position)
        if start == len(self._buffer) or _BEGUN_LONE_NAME.fullmatch(self._buffer, start):
            return UNDECIDED
        is_listed = self._context.opener == "[" and self._buffer[start] != "]"
        if is_listed or _LONE_NAME.match(self._buffer, start):
            raise NotACallError(start)
        self._close_call(position)
        self._step = self._before_call
        return position

    def _close_call(self, settled: int) -> None:
        self._call.close(settled)
        self._calls_ended += 1

    def _new_call(self) -> _NamedCall | _ObjectCall:
        calls, call = self._context.calls, self._block.call
        if isinstance(call, CallHead):
            return _NamedCall(calls, self._outbox, head=call, ends=self._block.all_ends)
        is_quotable = self._context.in_thought and not self._calls_ended
        is_doubtful = is_quotable or self._context.opener in _BARE_OPENERS
        ends = self._block.all_ends
        return _ObjectCall(calls, self._outbox, keys=call, ends=ends, is_doubtful=is_doubtful)
