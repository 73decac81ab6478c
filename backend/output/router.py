"""Text to deltas: splits a reply into content, thought and tool calls while it is written."""

import logging
from collections.abc import Callable, Set
from functools import lru_cache

from backend.core.delta import ContentDelta, Delta, ReasoningDelta
from backend.output.automaton import Automaton, Scanner
from backend.output.format import OutputFormat
from backend.output.segment import (
    PlainText,
    Segment,
    TextAfterCall,
    TextAfterThought,
    ThoughtText,
)
from backend.output.tool_calls.wire import (
    CallLedger,
    WireContext,
    WireCursor,
    WireOutput,
    new_call_id,
)

log = logging.getLogger(__name__)


class Router:
    """Routes the text of one reply; how the text is cut makes no difference.

    Everything that is no marker comes out, in order, but for the whitespace that belongs to
    markers (see `segment`). A wire that raises is the end of routing: what was held back and
    the rest of the reply are content then.
    """

    def __init__(
        self,
        output_format: OutputFormat,
        *,
        tool_names: frozenset[str] | None,
        opens_in_reasoning: bool,
        make_call_id: Callable[[], str] = new_call_id,
    ) -> None:
        """Begin a reply.

        Args:
            output_format: How the model writes.
            tool_names: The names that were offered; `None` takes any name for one. Without
                any, calls are content.
            opens_in_reasoning: Whether the prompt ended inside a thought.
            make_call_id: Makes an id for a call whose wire carries none.
        """
        self._format = output_format
        self._calls = CallLedger(tool_names, make_call_id)
        self._scanner = Scanner(_automaton(self._markers()))
        self._in_thought = opens_in_reasoning
        self._segment: Segment = ThoughtText() if opens_in_reasoning else PlainText()
        self._wire: WireCursor | None = None
        self._rest = ""
        self._deltas: list[Delta] = []
        self._is_off = False
        self._ended_mid_call = False

    @property
    def completed_calls(self) -> Set[int]:
        """Indexes of the calls that were handed out whole."""
        return self._calls.completed

    @property
    def ended_mid_call(self) -> bool:
        """Whether the reply broke off inside a call."""
        return self._ended_mid_call

    def feed(self, text: str) -> list[Delta]:
        """Return what is certain with this text."""
        self._rest += text
        return self._guarded(self._route)

    def finish(self, *, truncated: bool) -> list[Delta]:
        """Return what was held back.

        Args:
            truncated: Whether the token limit cut the reply off: an open call just ends then.
        """
        return self._guarded(lambda: self._end(truncated=truncated))

    def _guarded(self, route: Callable[[], None]) -> list[Delta]:
        try:
            if not self._is_off:
                route()
        except Exception:
            # A bug in a parser must not cost the reply.
            log.exception("routing failed: the rest of this reply is content")
            self._switch_off()
        if self._is_off and self._rest:
            self._deltas.append(ContentDelta(self._rest))
            self._rest = ""
        deltas, self._deltas = self._deltas, []
        return deltas

    def _switch_off(self) -> None:
        """Turn everything that is held back into content to come."""
        held = self._wire.held if self._wire else self._scanner.finish()
        self._rest = self._segment.held + held + self._rest
        self._is_off = True

    def _route(self) -> None:
        while self._rest:
            if self._wire is not None:
                self._apply(self._wire.feed(self._rest))
            else:
                scan = self._scanner.feed(self._rest)
                self._rest = scan.match + scan.rest
                self._emit(scan.safe)
                self._enter(scan.match)
                self._rest = scan.rest

    def _end(self, *, truncated: bool) -> None:
        if self._wire is None:
            self._emit(self._scanner.finish())
            return
        self._ended_mid_call = self._wire.is_mid_call
        self._apply(self._wire.finish(truncated=truncated))

    def _apply(self, output: WireOutput) -> None:
        self._rest = output.rest or ""
        if output.deltas:
            self._begin(TextAfterCall())
            self._deltas += output.deltas
        self._emit(output.rejected)
        if output.rest is not None:
            self._wire = None

    def _enter(self, marker: str) -> None:
        """Go where a marker leads; some are swallowed, some are text after all."""
        reasoning = self._format.reasoning
        if not marker:
            return
        if marker == reasoning.end:
            if self._in_thought or self._segment.is_blank:
                self._begin(TextAfterThought())
        elif marker != reasoning.start:
            self._open_wire(marker)
        elif not self._in_thought:
            self._begin(ThoughtText(), in_thought=True)
        elif not self._segment.is_blank:
            self._emit(marker)

    def _begin(self, segment: Segment, *, in_thought: bool = False) -> None:
        self._segment = segment
        self._in_thought = in_thought

    def _open_wire(self, opener: str) -> None:
        if self._format.tools.make_cursor is not None:
            context = WireContext(opener=opener, calls=self._calls, in_thought=self._in_thought)
            self._wire = self._format.tools.make_cursor(context)

    def _emit(self, text: str) -> None:
        if passing := self._segment.feed(text):
            kind = ReasoningDelta if self._in_thought else ContentDelta
            self._deltas.append(kind(passing))

    def _markers(self) -> tuple[str, ...]:
        reasoning, tools = self._format.reasoning, self._format.tools
        openers = tools.openers if self._calls.expects_calls else ()
        return tuple(filter(None, (reasoning.start, reasoning.end, *openers)))


@lru_cache
def _automaton(markers: tuple[str, ...]) -> Automaton:
    return Automaton(markers)
