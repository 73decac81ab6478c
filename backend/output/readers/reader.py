"""The interface of readers: they turn the text after an opener into deltas."""

import secrets
import string
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from backend.core.delta import Delta, ToolCallDelta
from backend.output.readers.values.schema import JsonSchema, ParameterTypes

MAX_NAME_CHARS = 256


_ALPHANUMERIC = string.ascii_letters + string.digits


def new_call_id(chars: int = 0) -> str:
    """Return an id that no other call has, of so many letters and digits if any."""
    if chars:
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(chars))
    return f"call_{secrets.token_hex(12)}"


class NotACallError(Exception):
    """The text is no call from `position` on."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


class CallLedger:
    """The calls of one reply: which names count, how many were begun, which were completed."""

    def __init__(
        self, tools: Mapping[str, JsonSchema] | None, make_id: Callable[[], str] = new_call_id
    ) -> None:
        """Begin a reply.

        Args:
            tools: The names that were offered, and the schemas of their arguments; `None` takes
                any name for one.
            make_id: Makes an id for a call that comes without one.
        """
        self._tools = tools
        self._make_id = make_id
        self._ids: list[str] = []
        self._arguments: list[str] = []
        self._open_name = ""
        self._is_open = False
        self._completed: set[int] = set()
        self._repairs: dict[int, tuple[str, ...]] = {}

    @property
    def completed(self) -> Set[int]:
        """Indexes of the calls that were handed out whole."""
        return self._completed

    @property
    def repairs(self) -> Mapping[int, tuple[str, ...]]:
        """Repairs that calls needed, by the index of the call."""
        return self._repairs

    @property
    def is_open(self) -> bool:
        """Whether the latest call was handed out in part."""
        return self._is_open

    @property
    def open_name(self) -> str:
        """The name of the latest call."""
        return self._open_name

    @property
    def open_arguments(self) -> str:
        """The arguments of the latest call, as far as they were handed out."""
        return "".join(self._arguments)

    @property
    def expects_calls(self) -> bool:
        """Whether there is any name that a call may have."""
        return self._tools is None or bool(self._tools)

    def is_offered(self, name: str) -> bool:
        """Tell whether a call may have this name."""
        return bool(name) and (self._tools is None or name in self._tools)

    def may_become_offered(self, beginning: str) -> bool:
        """Tell whether a name that begins so may be that of a call."""
        if self._tools is None:
            return len(beginning) <= MAX_NAME_CHARS
        return any(name.startswith(beginning) for name in self._tools)

    def parameter_types(self, name: str) -> ParameterTypes:
        """Return the types of the arguments of a tool."""
        return ParameterTypes((self._tools or {}).get(name, {}))

    def open(self, name: str, call_id: str = "") -> ToolCallDelta:
        """Begin the next call; its arguments follow under the same index.

        Args:
            name: An offered name.
            call_id: The id that the model wrote; one that this reply has seen is replaced.
        """
        if not call_id or call_id in self._ids:
            call_id = self._make_id()
        self._ids.append(call_id)
        self._arguments = []
        self._open_name = name
        self._is_open = True
        return ToolCallDelta(len(self._ids) - 1, call_id=call_id, name=name)

    def identify(self, call_id: str) -> ToolCallDelta:
        """Return a piece that gives the latest call an id that comes late.

        Args:
            call_id: The id; without one, or with one that this reply has seen, the call keeps
                the id that it has.
        """
        if call_id and call_id not in self._ids:
            self._ids[-1] = call_id
        return ToolCallDelta(len(self._ids) - 1, call_id=self._ids[-1])

    def extend(self, arguments: str) -> ToolCallDelta:
        """Return a piece of the arguments of the latest call."""
        self._arguments.append(arguments)
        return ToolCallDelta(len(self._ids) - 1, arguments=arguments)

    def complete(self, *repairs: str) -> None:
        """Count the latest call as handed out whole.

        Args:
            repairs: The repairs that it needed.
        """
        latest = len(self._ids) - 1
        self._is_open = False
        self._completed.add(latest)
        if repairs:
            self._repairs[latest] = repairs

    def abandon(self) -> None:
        """Leave the latest call as it is: it does not count."""
        self._is_open = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderContext:
    """Where calls begin.

    Attributes:
        opener: The text that was read; it is the first raw text of the calls. A format that
            owns the reply begins without one.
        in_thought: Whether a thought is open, where a marker may be a mere quotation.
        prompt_tail: The end of the prompt, for a format whose reply goes on with a message that
            the prompt began.
    """

    opener: str
    calls: CallLedger
    in_thought: bool
    prompt_tail: str = ""


@dataclass(frozen=True, slots=True)
class ReaderOutput:
    """The outcome of a piece of text, in this order.

    Attributes:
        deltas: In most formats pieces of calls.
        rejected: Raw text that is no call after all: it belongs to the channel around it.
        rest: Text after the end of the calls, for the router to go on with; `None` before that.
        is_damaged: Whether the reader gave up before their end.
    """

    deltas: tuple[Delta, ...] = ()
    rejected: str = ""
    rest: str | None = None
    is_damaged: bool = False


class Outbox:
    """The deltas of one `feed`, and the raw text that is left over."""

    def __init__(self, opener: str) -> None:
        self._raw = [opener]
        self._deltas: list[Delta] = []
        self._settled: int | None = None
        self._fed_before = 0

    @property
    def held(self) -> str:
        """Raw text that was taken in and not handed out."""
        return "".join(self._raw)

    def begin(self, fed_before: int = 0) -> None:
        """Begin a `feed`, and forget the rest of one that raised.

        Args:
            fed_before: The length of the text that was fed before and is still being read.
        """
        self._deltas = []
        self._settled = None
        self._fed_before = fed_before

    def move(self, chars: int) -> None:
        """Take it that positions from here on are so many characters further on."""
        self._fed_before += chars

    def send(self, delta: Delta, settled: int) -> None:
        """Hand out a delta that accounts for the text that is being read up to a position."""
        self._deltas.append(delta)
        self.drop(settled)

    def drop(self, settled: int) -> None:
        """Take the text up to a position for markup: there is nothing to hand out for it."""
        self._settled = settled - self._fed_before

    def end(self, taken: str) -> tuple[Delta, ...]:
        """End a `feed` that took this text, and return the deltas."""
        settled = self._settled
        self._raw.append(taken)
        if settled is not None:
            raw = taken if settled >= 0 else self.held
            self._raw = [raw[len(raw) - len(taken) + settled :]]
        return tuple(self._deltas)


class Reader(Protocol):
    """Reads one stretch of tool calls, from its opener to its end.

    Nothing of a call is handed out before its name is known to be offered. Deltas must not
    depend on how the text was cut.
    """

    @property
    def held(self) -> str:
        """Raw text that was taken in and not handed out; unchanged by a `feed` that raised."""

    @property
    def is_mid_call(self) -> bool:
        """Whether the reply would break off inside a call if it ended here."""

    def feed(self, text: str) -> ReaderOutput:
        """Read on; not called again once `rest` was given."""

    def finish(self, *, truncated: bool) -> ReaderOutput:
        """End with the reply, without a rest; when it was truncated, an open call just ends."""


MakeReader: TypeAlias = Callable[[ReaderContext], Reader]
