"""What a tool-call wire is to the router: a cursor over the text behind its opener."""

import uuid
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from backend.core.delta import Delta, ToolCallDelta

MAX_NAME_CHARS = 256


def new_call_id() -> str:
    """Return an id that no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"


class CallLedger:
    """The calls of one reply: which names count, how many were begun, which were completed."""

    def __init__(
        self, tool_names: frozenset[str] | None, make_id: Callable[[], str] = new_call_id
    ) -> None:
        """Begin a reply.

        Args:
            tool_names: The names that were offered; `None` takes any name for one.
            make_id: Makes an id for a call whose wire carries none.
        """
        self._tool_names = tool_names
        self._make_id = make_id
        self._opened = 0
        self._completed: set[int] = set()

    @property
    def completed(self) -> Set[int]:
        """Indexes of the calls that were handed out whole."""
        return self._completed

    @property
    def expects_calls(self) -> bool:
        """Whether there is any name that a call may have."""
        return self._tool_names is None or bool(self._tool_names)

    def is_offered(self, name: str) -> bool:
        """Tell whether a call may have this name."""
        return bool(name) and (self._tool_names is None or name in self._tool_names)

    def may_become_offered(self, beginning: str) -> bool:
        """Tell whether a name that begins so may be that of a call."""
        if self._tool_names is None:
            return len(beginning) <= MAX_NAME_CHARS
        return any(name.startswith(beginning) for name in self._tool_names)

    def open(self, name: str) -> ToolCallDelta:
        """Begin the next call; its arguments follow under the same index."""
        delta = ToolCallDelta(self._opened, call_id=self._make_id(), name=name)
        self._opened += 1
        return delta

    def extend(self, arguments: str) -> ToolCallDelta:
        """Return a piece of the arguments of the latest call."""
        return ToolCallDelta(self._opened - 1, arguments=arguments)

    def complete(self) -> None:
        """Count the latest call as handed out whole."""
        self._completed.add(self._opened - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireContext:
    """Where a wire begins.

    Attributes:
        opener: The marker that was read; it is the wire's first raw text.
        in_thought: Whether a thought is open, where a marker may be a mere quotation.
    """

    opener: str
    calls: CallLedger
    in_thought: bool


@dataclass(frozen=True, slots=True)
class WireOutput:
    """What a piece of text came to, in this order.

    Attributes:
        deltas: What is handed out: in most wires, pieces of calls.
        rejected: Raw text that is no call after all: it belongs to the channel around the wire.
        rest: Text behind the wire's end, for the router to go on with; `None` while it goes on.
    """

    deltas: tuple[Delta, ...] = ()
    rejected: str = ""
    rest: str | None = None


class Outbox:
    """What a cursor hands out during one `feed`, and the raw text that is left over."""

    def __init__(self, opener: str) -> None:
        self._raw = [opener]
        self._deltas: list[Delta] = []
        self._settled: int | None = None

    @property
    def held(self) -> str:
        """Raw text that was taken in and not handed out."""
        return "".join(self._raw)

    def begin(self) -> None:
        """Begin a `feed`; what one that raised left here is forgotten."""
        self._deltas = []
        self._settled = None

    def send(self, delta: Delta, settled: int) -> None:
        """Hand out a delta that accounts for the text up to a position."""
        self._deltas.append(delta)
        self._settled = settled

    def end(self, taken: str) -> tuple[Delta, ...]:
        """End a `feed` that took this text, and return the deltas."""
        if self._settled is None:
            self._raw.append(taken)
        else:
            self._raw = [taken[self._settled :]]
        return tuple(self._deltas)


class WireCursor(Protocol):
    """Reads one stretch of tool calls, from its opener to its end.

    Nothing of a call is handed out before its name is known to be offered. What is handed out
    must not depend on how the text was cut.
    """

    @property
    def held(self) -> str:
        """Raw text that was taken in and not handed out; unchanged by a `feed` that raised."""

    @property
    def is_mid_call(self) -> bool:
        """Whether the reply would break off inside a call if it ended here."""

    def feed(self, text: str) -> WireOutput:
        """Read on; not called again once `rest` was given."""

    def finish(self, *, truncated: bool) -> WireOutput:
        """End with the reply, without a rest; when it was truncated, an open call just ends."""


WireFactory: TypeAlias = Callable[[WireContext], WireCursor]
