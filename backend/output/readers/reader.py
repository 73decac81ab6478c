"""The interface of readers, which turn the text after an opener into deltas."""

import json
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from backend.core.delta import Delta, ToolCallDelta
from backend.output.readers.call_ids import CallIds, name_in_id
from backend.output.readers.values.continuation import continued
from backend.output.readers.values.schema import JsonSchema, ParameterTypes
from backend.output.readers.values.wrapping import Unwrapping, unwrapped

MAX_NAME_CHARS = 256


class NotACallError(Exception):
    """From `position` on, the text is not a call."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


class CallLedger:
    """The calls of one reply: which names are valid, which calls were begun and completed."""

    def __init__(
        self, tools: Mapping[str, JsonSchema] | None, call_ids: CallIds | None = None
    ) -> None:
        """Begin a reply.

        Args:
            tools: The offered names and the schemas of their arguments; `None` accepts any
                name.
            call_ids: The ids of the conversation; by default there are none yet.
        """
        self._tools = tools
        self._call_ids = call_ids or CallIds()
        self._ids: list[str] = []
        self._arguments: list[str] = []
        self._sent: list[str] = []
        self._types = ParameterTypes({})
        self._unwrapping = Unwrapping(self._types)
        self._open_name = ""
        self._is_open = False
        self._completed: set[int] = set()
        self._repairs: dict[int, tuple[str, ...]] = {}

    @property
    def completed(self) -> Set[int]:
        """Indexes of the calls that were emitted in full."""
        return self._completed

    @property
    def repairs(self) -> Mapping[int, tuple[str, ...]]:
        """Repairs made to calls, by call index."""
        return self._repairs

    @property
    def is_open(self) -> bool:
        """Whether the latest call was emitted in part."""
        return self._is_open

    @property
    def open_name(self) -> str:
        """The name of the latest call."""
        return self._open_name

    @property
    def open_arguments(self) -> str:
        """The emitted arguments of the latest call."""
        return "".join(self._sent)

    @property
    def expects_calls(self) -> bool:
        """Whether any name is valid for a call."""
        return self._tools is None or bool(self._tools)

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
        """Return the tools whose schemas allow exactly these arguments."""
        return [name for name in self._tools or () if self.parameter_types(name).fit(keys)]

    @property
    def only_name(self) -> str:
        """The only offered name; empty if there are several."""
        return next(iter(self._tools)) if self._tools and len(self._tools) == 1 else ""

    def parameter_types(self, name: str) -> ParameterTypes:
        """Return the argument types of a tool."""
        return ParameterTypes((self._tools or {}).get(name, {}))

    def open(self, name: str, call_id: str = "") -> ToolCallDelta:
        """Begin the next call; its arguments follow under the same index.

        Args:
            name: An offered name.
            call_id: The id written by the model; a repeated one is replaced.
        """
        call_id = self._call_ids.take(name, call_id)
        self._ids.append(call_id)
        self._arguments = []
        self._sent = []
        self._types = self.parameter_types(name)
        self._unwrapping = Unwrapping(self._types)
        self._open_name = name
        self._is_open = True
        return ToolCallDelta(len(self._ids) - 1, call_id=call_id, name=name)

    def identify(self, call_id: str) -> ToolCallDelta:
        """Return a piece that sets the id of the latest call belatedly.

        Args:
            call_id: The id; if it is empty or repeated, the call keeps its present one.
        """
        if self._call_ids.accepts(call_id):
            self._call_ids.note(call_id)
            self._ids[-1] = call_id
        return ToolCallDelta(len(self._ids) - 1, call_id=self._ids[-1])

    def extend(self, arguments: str) -> ToolCallDelta:
        """Return a piece of the latest call's arguments, without a wrapper around them.

        It may be empty: wrapped arguments wait for their end.
        """
        self._arguments.append(arguments)
        return self._piece(self._unwrapping.feed(arguments))

    def _piece(self, arguments: str) -> ToolCallDelta:
        self._sent.append(arguments)
        return ToolCallDelta(len(self._ids) - 1, arguments=arguments)

    def lacks_arguments(self, name: str, arguments: str) -> bool:
        """Tell whether arguments, a JSON object, lack some that a tool requires."""
        types = self.parameter_types(name)
        return bool(types.required - json.loads(unwrapped(arguments, types)).keys())

    def settle(self, arguments: str) -> ToolCallDelta | None:
        """Return the piece that completes the latest call's arguments, however they were written.

        Args:
            arguments: All arguments as JSON.

        Returns:
            `None` if those already emitted are not a beginning of them.
        """
        rest = continued(self.open_arguments, unwrapped(arguments, self._types))
        return None if rest is None else self._piece(rest)

    def complete(self, *repairs: str) -> None:
        """Count the latest call as emitted in full.

        Args:
            repairs: Repairs that it needed.
        """
        latest = len(self._ids) - 1
        self._is_open = False
        self._completed.add(latest)
        if repairs:
            self._repairs[latest] = repairs

    def abandon(self) -> None:
        """Leave the latest call incomplete: it does not count."""
        self._is_open = False

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
        prompt_tail: The end of the prompt, for a format whose reply continues a message begun by
            the prompt.
    """

    opener: str
    calls: CallLedger
    in_thought: bool
    in_prose: bool = False
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
        """Begin a `feed`, and forget the rest of one that raised.

        Args:
            fed_before: Length of the text that was fed earlier and is still being read.
        """
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
