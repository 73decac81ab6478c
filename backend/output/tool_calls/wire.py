"""What a tool-call wire is to the router: a cursor over the text behind its opener."""

import uuid
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from backend.core.delta import Delta, ToolCallDelta
from backend.output.tool_calls.schema import JsonSchema, ParameterTypes

MAX_NAME_CHARS = 256


def new_call_id() -> str:
    """Return an id that no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"


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
            make_id: Makes an id for a call whose wire carries none.
        """
        self._tools = tools
        self._make_id = make_id
        self._ids: list[str] = []
        self._completed: set[int] = set()

    @property
    def completed(self) -> Set[int]:
        """Indexes of the calls that were handed out whole."""
        return self._completed

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
        """Return what is known of the arguments of a tool."""
        return ParameterTypes((self._tools or {}).get(name, {}))

    def open(self, name: str, call_id: str = "") -> ToolCallDelta:
        """Begin the next call; its arguments follow under the same index.

        Args:
            name: An offered name.
            call_id: The id that the wire carries; one that this reply has seen is replaced.
        """
        if not call_id or call_id in self._ids:
            call_id = self._make_id()
        self._ids.append(call_id)
        return ToolCallDelta(len(self._ids) - 1, call_id=call_id, name=name)

    def identify(self, call_id: str) -> ToolCallDelta:
        """Return a piece that gives the latest call the id that its wire tells late.

        Args:
            call_id: The id; without one, or with one that this reply has seen, the call keeps
                the id that it has.
        """
        if call_id and call_id not in self._ids:
            self._ids[-1] = call_id
        return ToolCallDelta(len(self._ids) - 1, call_id=self._ids[-1])

    def extend(self, arguments: str) -> ToolCallDelta:
        """Return a piece of the arguments of the latest call."""
        return ToolCallDelta(len(self._ids) - 1, arguments=arguments)

    def complete(self) -> None:
        """Count the latest call as handed out whole."""
        self._completed.add(len(self._ids) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireContext:
    """Where a wire begins.

    Attributes:
        opener: The text that was read; it is the wire's first raw text. A wire that owns the
            reply begins without one.
        in_thought: Whether a thought is open, where a marker may be a mere quotation.
        prompt_tail: The end of the prompt, for a wire whose reply goes on with a message that
            the prompt began.
    """

    opener: str
    calls: CallLedger
    in_thought: bool
    prompt_tail: str = ""


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
        """Hand out a delta that accounts for the text up to a position.

        Positions count from the start of this `feed`; below zero lies what was fed before.
        """
        self._deltas.append(delta)
        self._settled = settled

    def drop(self, settled: int) -> None:
        """Take the text up to a position for markup: there is nothing to hand out for it."""
        self._settled = settled

    def end(self, taken: str) -> tuple[Delta, ...]:
        """End a `feed` that took this text, and return the deltas."""
        settled = self._settled
        self._raw.append(taken)
        if settled is not None:
            raw = taken if settled >= 0 else self.held
            self._raw = [raw[len(raw) - len(taken) + settled :]]
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
