"""The interface of readers, which turn the text after an opener into deltas."""

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from backend.core.step import Delta, ToolCallDelta
from backend.formats.dialects import INDEX, NAME, Id, NamedJson, Template, filled
from backend.formats.format import ToolFormat
from backend.output.readers.patterns import REFUTED, either, span_end
from backend.output.readers.tolerant_json import Unwrapping, unwrapped
from backend.output.readers.typed_values import JsonSchema, ParameterTypes, continued

MakeId: TypeAlias = Callable[[str, int], str]

_ALPHANUMERIC = string.ascii_letters + string.digits
_LABEL = r"(?:functions?|tools?|calls?|tool_?calls?|chatcmpl-tool|toolu|fc|id)"
# `functions.`, `functions_`, `functions`, `call_`, a namespace, or nothing.
_BEFORE_NAME = re.compile(rf"(?:{_LABEL}[.:_/#-]*|[\w-]+[.:/])*", re.IGNORECASE)
# A number, or characters that are too random for a part of another name.
_AFTER_NAME = re.compile(
    r"[.:_/#-]*\d*|[.:/#](?=[a-z]*\d)[0-9a-z]+|[_-](?=[a-f]*\d)[0-9a-f]{6,}", re.IGNORECASE
)
_NAMELESS = re.compile(rf"{_LABEL}[.:_/#-]*[0-9a-z-]*|[.:_/#-]*\d*", re.IGNORECASE)


# Words of the syntaxes themselves, between an opener and the name of a tool.
SYNTAX = frozenset(
    {
        *("name", "tool_name", "function", "functions", "call", "tool", "tool_call", "invoke"),
        *("type", "id", "index", "tool_call_id", "json", "recipient_name", "tool_calls"),
        *("function_name", "action"),
    }
)
USUAL_NAMESPACES = ("functions", "tools", "default_api")
NAMESPACES = frozenset({*SYNTAX, *USUAL_NAMESPACES})
"""Words that models write before a name, with a dot or a colon between."""

_NAMESPACE = re.compile(rf"(?:(?:{'|'.join(sorted(NAMESPACES))})[.:])+")
# Meta's prompts have built-in tools called as `f.call(...)`.
_NUMBER = re.compile(r"(?:[.:]\d+|\.call)\Z")


class Names(Protocol):
    """Tells which tools were offered."""

    def is_offered(self, name: str) -> bool:
        """Tell whether a name is valid for a call."""

    def parameter_types(self, name: str) -> ParameterTypes:
        """Return the argument types of a tool."""


def offered_name(word: str, names: Names) -> str:
    """Return the offered name in a word, which may have a namespace and a number.

    It may also be written as code, or with the sign of a call after it. Any other word before or
    after it makes it the name of another tool.
    """
    plain = word.strip("`").removesuffix(":").removesuffix("()").strip("`")
    name = _NAMESPACE.sub("", plain, count=1) if _NAMESPACE.match(plain) else plain
    candidates = (word, plain, name, _NUMBER.sub("", plain), _NUMBER.sub("", name))
    return next(filter(names.is_offered, candidates), "")


def new_call_id(chars: int = 0) -> str:
    """Return a random id, with `chars` letters and digits if not zero."""
    if chars:
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(chars))
    return f"call_{secrets.token_hex(12)}"


class CallIds:
    """The ids of a conversation's calls: none comes twice."""

    def __init__(self, make: MakeId | None = None, used: Collection[str] = ()) -> None:
        """Begin a reply; `make` takes a tool's name and a number, and `used` ids do not come."""
        self._make = make or (lambda _name, _number: new_call_id())
        self._known = set(used)
        self._number = len(used)

    def take(self, name: str, written: str = "") -> str:
        """Return the id of the next call: the written one, unless it is empty or known."""
        if not self.accepts(written):
            written = self._new(name)
        self._number += 1
        self._known.add(written)
        return written

    def accepts(self, written: str) -> bool:
        """Tell whether a call may have this id."""
        return bool(written) and written not in self._known

    def note(self, written: str) -> None:
        """Count an id as used."""
        self._known.add(written)

    def _new(self, name: str) -> str:
        number = self._number
        while (made := self._make(name, number)) in self._known:
            number += 1
        return made


def ids_of(tool_format: ToolFormat, used: Collection[str] = ()) -> CallIds:
    """Return the ids of calls in a format, after those of the conversation so far."""
    template = _template(tool_format)
    if template is not None:
        return CallIds(partial(_filled, template), used)
    return CallIds(lambda _name, _number: new_call_id(tool_format.id_chars), used)


def _template(tool_format: ToolFormat) -> Template | None:
    """Return the template of ids in a format whose ids contain the name of the tool."""
    calls = (reading.dialect for reading in tool_format.readings)
    parts = (part for dialect in calls if isinstance(dialect, NamedJson) for part in dialect.call)
    ids = (part.template for part in parts if isinstance(part, Id) and NAME in part.template)
    return next(ids, None)


def _filled(template: Template, name: str, number: int) -> str:
    return filled(template, {NAME: name, INDEX: str(number)})


def name_in_id(call_id: str, names: Iterable[str]) -> str:
    """Return the offered name in an id, however it is joined with the rest; empty if there is none.

    Of several, the longest one wins; after a name that ends in a digit, other digits are its
    number only after a separator.
    """
    found = [
        (is_glued, -len(name), name)
        for name in names
        if (is_glued := _is_glued(call_id, name)) is not None
    ]
    return min(found)[2] if found else ""


def _is_glued(call_id: str, name: str) -> bool | None:
    """Tell whether a digit of a name runs into its number; `None` if the id lacks the name."""
    start = call_id.find(name)
    while start >= 0:
        after = call_id[start + len(name) :]
        if _BEFORE_NAME.fullmatch(call_id[:start]) and _AFTER_NAME.fullmatch(after):
            return name[-1:].isdigit() and after[:1].isdigit()
        start = call_id.find(name, start + 1)
    return None


def is_nameless(call_id: str) -> bool:
    """Tell whether an id does not name a tool at all, as `call_ab12CD` or `functions:0`."""
    return _NAMELESS.fullmatch(call_id) is not None


MAX_NAME_CHARS = 256


class NotACallError(Exception):
    """From `position` on, the text is not a call."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


class CallLedger:
    """The calls of one reply: which names are valid, which calls were begun and completed.

    Attributes:
        completed: Indexes of the calls that were emitted in full.
        repairs: Repairs made to calls, by call index.
        is_open: Whether the latest call was emitted in part.
        open_name: The name of the latest call.
    """

    def __init__(
        self, tools: Mapping[str, JsonSchema] | None, call_ids: CallIds | None = None
    ) -> None:
        """Begin a reply; `tools` of `None` accepts any name."""
        self._tools = tools
        self._call_ids = call_ids or CallIds()
        self._ids: list[str] = []
        self._arguments: list[str] = []
        self._sent: list[str] = []
        self._types = ParameterTypes({})
        self._unwrapping = Unwrapping(self._types)
        self.open_name = ""
        self.is_open = False
        self.completed: set[int] = set()
        self.repairs: dict[int, tuple[str, ...]] = {}

    @property
    def open_arguments(self) -> str:
        """The emitted arguments of the latest call."""
        return "".join(self._sent)

    def of_trial(self) -> "CallLedger":
        """Return the ledger of a reader whose calls do not count."""
        return CallLedger(self._tools)

    @property
    def expects_calls(self) -> bool:
        """Whether any name is valid for a call."""
        return self._tools is None or bool(self._tools)

    @property
    def names(self) -> tuple[str, ...]:
        """The offered names; empty if any name is valid."""
        return tuple(self._tools or ())

    def is_offered(self, name: str) -> bool:
        """Tell whether a name is valid for a call."""
        return bool(name) and (self._tools is None or name in self._tools)

    def may_become_offered(self, beginning: str) -> bool:
        """Tell whether a beginning may become a valid name."""
        if self._tools is None:
            return len(beginning) <= MAX_NAME_CHARS
        return any(name.startswith(beginning) for name in self._tools)

    def name_in_id(self, call_id: str) -> str:
        """Return the offered name that an id contains; empty without one."""
        return name_in_id(call_id, self._tools or ())

    def names_fitting(self, keys: Set[str]) -> Iterable[str]:
        """Return the tools whose schemas allow exactly these arguments.

        Those that name them all come before those that take any.
        """
        fitting = [name for name in self._tools or () if self.parameter_types(name).fit(keys)]
        naming = [name for name in fitting if keys <= {*self.parameter_types(name).names}]
        return naming or fitting

    @property
    def only_name(self) -> str:
        """The only offered name; empty if there are several."""
        return next(iter(self._tools)) if self._tools and len(self._tools) == 1 else ""

    def parameter_types(self, name: str) -> ParameterTypes:
        """Return the argument types of a tool."""
        return ParameterTypes((self._tools or {}).get(name, {}))

    def open(self, name: str, call_id: str = "") -> ToolCallDelta:
        """Begin the next call, with the id written by the model unless it is a repeated one."""
        call_id = self._call_ids.take(name, call_id)
        self._ids.append(call_id)
        self._arguments = []
        self._sent = []
        self._types = self.parameter_types(name)
        self._unwrapping = Unwrapping(self._types)
        self.open_name = name
        self.is_open = True
        return ToolCallDelta(len(self._ids) - 1, call_id=call_id, name=name)

    def identify(self, call_id: str) -> ToolCallDelta:
        """Return a piece with a later id of the latest call, unless it is empty or repeated."""
        if self._call_ids.accepts(call_id):
            self._call_ids.note(call_id)
            self._ids[-1] = call_id
        return ToolCallDelta(len(self._ids) - 1, call_id=self._ids[-1])

    def extend(self, arguments: str) -> ToolCallDelta:
        """Return a piece of the latest call's arguments, without a wrapper around them.

        It may be empty: wrapped arguments wait for their end.
        """
        self._arguments.append(arguments)
        return self._piece(self._unwrapping.unwrap(arguments))

    def _piece(self, arguments: str) -> ToolCallDelta:
        self._sent.append(arguments)
        return ToolCallDelta(len(self._ids) - 1, arguments=arguments)

    def lacks_arguments(self, name: str, arguments: str) -> bool:
        """Tell whether arguments, a JSON object, lack some that a tool requires."""
        types = self.parameter_types(name)
        return bool(types.required - json.loads(unwrapped(arguments, types)).keys())

    def settle(self, arguments: str) -> ToolCallDelta | None:
        """Return the rest of the latest call's arguments; `None` if others were emitted."""
        rest = continued(self.open_arguments, unwrapped(arguments, self._types))
        return None if rest is None else self._piece(rest)

    def complete(self, *repairs: str) -> None:
        """Count the latest call as emitted in full."""
        latest = len(self._ids) - 1
        self.is_open = False
        self.completed.add(latest)
        if repairs:
            self.repairs[latest] = repairs

    def abandon(self) -> None:
        """Leave the latest call incomplete: it does not count."""
        self.is_open = False

    def break_off(self, arguments: str) -> ToolCallDelta:
        """Leave the latest call incomplete, with these arguments but for their last brace."""
        self.abandon()
        return self._piece(arguments[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderContext:
    """The context in which calls begin.

    Attributes:
        opener: The opener, which is the first raw text of the calls; empty for a format that owns
            the reply.
        in_thought: Whether a thought is open, where a marker may be just a quotation.
        in_prose: Whether the opener stands within a line of text, where it may be a word.
        in_fence: Whether a fence around the calls is open, whose end is not theirs.
        prompt_tail: The end of the prompt, for a format whose reply continues a message begun by
            the prompt.
    """

    opener: str
    calls: CallLedger
    in_thought: bool
    in_prose: bool = False
    in_fence: bool = False
    prompt_tail: str = ""


@dataclass(frozen=True, slots=True)
class ReaderOutput:
    """The outcome of reading a piece of text, in this order.

    Attributes:
        deltas: In most formats, pieces of calls.
        rejected: Raw text that is not a call after all; it belongs to the surrounding channel.
        rest: Text after the end of the calls, for the router to read; `None` before the end.
        is_damaged: Whether the reader gave up before the end of the calls.
    """

    deltas: tuple[Delta, ...] = ()
    rejected: str = ""
    rest: str | None = None
    is_damaged: bool = False


class Outbox:
    """The deltas of one `feed`, and the raw text not accounted for."""

    def __init__(self, opener: str) -> None:
        self._raw = [opener]
        self._deltas: list[Delta] = []
        self._settled: int | None = None
        self._fed_before = 0

    @property
    def held(self) -> str:
        """Raw text consumed but not emitted."""
        return "".join(self._raw)

    def begin(self, fed_before: int = 0) -> None:
        """Begin a `feed`, forget one that raised; `fed_before` characters are still unread."""
        self._deltas = []
        self._settled = None
        self._fed_before = fed_before

    def move(self, chars: int) -> None:
        """Shift all positions from here on by a number of characters."""
        self._fed_before += chars

    def send(self, delta: Delta, settled: int) -> None:
        """Emit a delta that accounts for the text being read up to a position."""
        self._deltas.append(delta)
        self.drop(settled)

    def drop(self, settled: int) -> None:
        """Treat the text up to a position as markup, for which nothing is emitted."""
        self._settled = settled - self._fed_before

    def end(self, taken: str) -> tuple[Delta, ...]:
        """End a `feed` that consumed this text, and return the deltas."""
        settled = self._settled
        self._raw.append(taken)
        if settled is not None:
            raw = taken if settled >= 0 else self.held
            self._raw = [raw[len(raw) - len(taken) + settled :]]
        return tuple(self._deltas)


class Reader(Protocol):
    """Reads one stretch of tool calls, from its opener to its end.

    Nothing of a call is emitted before its name is known to be offered. Deltas must not
    depend on how the text was split.
    """

    @property
    def held(self) -> str:
        """Raw text consumed but not emitted; a `feed` that raises leaves it unchanged."""

    @property
    def is_mid_call(self) -> bool:
        """Whether the reply would end inside a call if it ended here."""

    def feed(self, text: str) -> ReaderOutput:
        """Read more text; not called again after `rest` was returned."""

    def finish(self, *, truncated: bool) -> ReaderOutput:
        """End with the reply, without a rest; an open call of a truncated reply just ends."""


MakeReader: TypeAlias = Callable[[ReaderContext], Reader]


Step: TypeAlias = Callable[[int], int]

_SPACE = re.compile(r"\s*")


class SteppingReader(ABC):
    """Keeps unread text and runs steps over it.

    A step reads from a position of the buffer and returns the position after the text that it
    consumed, or a negative number if more text is needed.
    """

    def __init__(self, context: ReaderContext, *, opener_is_call: bool) -> None:
        """Begin after an opener, which must be read if it begins a call."""
        self._context = context
        self._outbox = Outbox(context.opener)
        self._buffer = context.opener if opener_is_call else ""
        self._unread_opener = len(self._buffer)
        self._step: Step = self._before_call
        self._missing_end = ""
        self._keys: list[str] = []
        # Of a call that nothing has confirmed yet.
        self._name = ""
        self._calls_begun = self._calls_ended = 0
        self._is_over = False
        self._outbox.begin(len(self._buffer))

    @property
    def held(self) -> str:
        """Raw text since the last delta."""
        return self._outbox.held

    @property
    def is_mid_call(self) -> bool:
        """Whether a call is open, emitted or not, or has begun, or none has been completed yet."""
        return self._is_open or self._has_begun_next

    @property
    def _is_open(self) -> bool:
        """Whether a call is open, emitted or not, or none has been completed yet."""
        return bool(self._name) or self._is_in_call or not self._calls_ended

    @property
    def _has_begun_next(self) -> bool:
        """Whether text after a whole call begins another one, whose name is not certain yet."""
        return False

    @property
    def _is_in_call(self) -> bool:
        return self._calls_begun > self._calls_ended

    def feed(self, text: str) -> ReaderOutput:
        """Read more text."""
        self._begin(text)
        position = 0
        try:
            while not self._is_over and (end := self._step(position)) >= 0:
                position = end
        except NotACallError as error:
            return self._reject(text, error.position)
        self._buffer = rest = self._buffer[position:]
        self._unread_opener = max(self._unread_opener - position, 0)
        deltas = self._outbox.end(text)
        return ReaderOutput(deltas, rest=rest if self._is_over else None)

    @abstractmethod
    def _before_call(self, position: int) -> int:
        """Find the beginning of a call, or the end of all calls."""

    def _begin(self, text: str) -> None:
        self._outbox.begin(len(self._buffer))
        self._buffer += text

    def _reject(self, text: str, position: int) -> ReaderOutput:
        """Return text that is not a call, or that follows the last one."""
        deltas = self._outbox.end(text)
        if not self._calls_begun:
            position = max(position, self._unread_opener)
        raw, rest = self.held, self._buffer[position:]
        raw = raw[: len(raw) - len(rest)]
        if self._is_open:
            return ReaderOutput(deltas, rejected=raw, rest=rest, is_damaged=True)
        return ReaderOutput(deltas, rest=raw + rest, is_damaged=True)

    def _begin_call(self, name: str, end: int) -> None:
        """Emit the beginning of a call that is certain from the text up to `end`."""
        self._calls_begun += 1
        self._missing_end = "{}"
        self._outbox.send(self._context.calls.open(name), end)

    def _hand_out_name(self, end: int) -> None:
        """Begin a call once something in it has confirmed that it is one."""
        if self._name:
            self._begin_call(self._name, end)
            self._name = ""

    def _begin_argument(self, key: str, end: int) -> None:
        """Emit a key as JSON."""
        self._keys.append(key)
        self._send(f"{{{key}: " if self._missing_end == "{}" else f", {key}: ", end)
        self._missing_end = "}"

    def _lacks_arguments(self, unsent_name: str) -> bool:
        """Tell whether a call that nothing has closed lacks arguments; an unsent one has none."""
        calls = self._context.calls
        name = unsent_name or calls.open_name
        keys = [] if unsent_name else self._keys
        return calls.lacks_arguments(name, f"{{{', '.join(f'{key}: 0' for key in keys)}}}")

    def _end_call(self, end: int) -> None:
        """Emit the end, which was held back so that an open call never looks complete."""
        self._send(self._missing_end, end)
        self._context.calls.complete()
        self._calls_ended += 1
        self._keys = []
        self._step = self._before_call

    def _send(self, piece: str, end: int) -> None:
        if piece:
            self._outbox.send(self._context.calls.extend(piece), end)

    def _skip_space(self, position: int) -> int:
        return span_end(_SPACE, self._buffer, position)

    def _expected(self, position: int, *ends: int) -> int:
        """Return the end of the text that must be at a position."""
        end = either(*ends)
        if end == REFUTED:
            raise NotACallError(position)
        return end


class MarkupReader:
    """Consumes one meaningless text, then ends."""

    held = ""
    is_mid_call = False

    def __init__(self, _context: ReaderContext, *, markup: str) -> None:
        self._markup = markup

    def feed(self, text: str) -> ReaderOutput:
        """Return everything after the text as the rest."""
        return ReaderOutput(rest=text.lstrip().removeprefix(self._markup))

    def finish(self, *, truncated: bool) -> ReaderOutput:
        """End before the text has arrived."""
        del truncated
        return ReaderOutput()
