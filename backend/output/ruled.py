"""Splits a reply whose answer is ruled by the caller's grammar."""

from collections.abc import Callable, Mapping, Sequence, Set

from backend.core.step import ContentDelta, Delta, ToolCallDelta
from backend.output.reply_format import OutputFormat, opens_after_thought, opens_in_reasoning
from backend.output.router import Router
from backend.output.text import Automaton

_LINES = ("\n\n", "\n")


class RuledRouter:
    """Routes a reply up to its answer; the answer is content to its last byte.

    The grammar of such a reply is a thought, the format's text between thought and answer, and the
    caller's grammar or calls. This class finds the place where the answer begins. The router
    reads the text before, and the text after it if its first part is a call.
    """

    def __init__(
        self,
        router: Router,
        output_format: OutputFormat,
        prompt_tail: str,
        *,
        may_call: bool,
        triggers: Sequence[str] = (),
    ) -> None:
        """Begin a reply; without triggers, all of the answer is ruled."""
        reasoning = output_format.reasoning
        self._router = router
        self._format = output_format
        self._may_call = may_call
        self._starts = () if opens_after_thought(output_format, prompt_tail) else reasoning.starts
        self._marks = Automaton(triggers or reasoning.ends)
        self._text = ""
        self._trial = ""
        self._deltas: list[Delta] = []
        self._step: Callable[[], bool] = self._at_start
        if triggers:
            self._step = self._before_trigger
        elif opens_in_reasoning(output_format, prompt_tail):
            self._step = self._in_thought

    @property
    def completed_calls(self) -> Set[int]:
        """Indexes of the calls that were emitted in full."""
        return self._router.completed_calls if self._is_routed else frozenset()

    @property
    def repairs(self) -> Mapping[int, tuple[str, ...]]:
        """Repairs made to calls, by call index."""
        return self._router.repairs if self._is_routed else {}

    @property
    def ended_mid_call(self) -> bool:
        """Whether the reply ended inside a call."""
        return self._is_routed and self._router.ended_mid_call

    @property
    def _is_routed(self) -> bool:
        return self._step != self._in_answer

    def feed(self, text: str) -> list[Delta]:
        """Return the deltas that this text makes certain."""
        self._text += text
        while self._text and self._step():
            pass
        return self._released()

    def finish(self, *, truncated: bool) -> list[Delta]:
        """Return the deltas that were held back; an open call of a truncated reply just ends."""
        if self._step == self._deciding:
            self._decide(self._router.finish(truncated=truncated))
            opens_call = self._trial.startswith(self._format.tools.openers)
            if self._step == self._deciding:
                self._begin_answer("" if truncated and opens_call else self._trial)
            elif self._step == self._in_calls:
                return self._released()
        if not self._is_routed or self._step in (self._at_start, self._before_answer):
            self._in_answer()
            return self._released()
        return (
            self._released()
            + self._router.feed(self._text)
            + self._router.finish(truncated=truncated)
        )

    def _released(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _at_start(self) -> bool:
        start = _leading(self._text, self._starts)
        if start is None:
            return False
        self._step = self._in_thought if start else self._before_answer
        self._route(len(start))
        return True

    def _in_thought(self) -> bool:
        position, end = self._marks.find(self._text)
        self._route(position + len(end))
        if not end or self._step != self._in_thought:
            return bool(end)
        self._step = self._after_thought
        if end == self._format.reasoning.answer:
            self._begin_answer("")
        return True

    def _after_thought(self) -> bool:
        bridge = self._format.reasoning.bridge
        between = _leading(self._text, (bridge,) if bridge else _LINES)
        if between is None:
            return False
        self._step = self._before_answer
        self._route(len(between))
        return True

    def _before_answer(self) -> bool:
        answer = self._format.reasoning.answer
        lead = _leading(self._text, (answer,) if answer else ())
        if lead is None:
            return False
        self._text = self._text[len(lead) :]
        self._step = self._in_answer if lead or not self._may_call else self._deciding
        return True

    def _before_trigger(self) -> bool:
        position, trigger = self._marks.find(self._text)
        self._route(position)
        if trigger and self._may_call:
            self._trial = self._router.held
            self._step = self._deciding
        elif trigger:
            self._begin_answer(self._router.held)
        return bool(trigger)

    def _deciding(self) -> bool:
        """Let the router read the answer until it is, or is not, a call."""
        self._trial += self._text
        text, self._text = self._text, ""
        self._decide(self._router.feed(text))
        return True

    def _decide(self, deltas: Sequence[Delta]) -> None:
        if deltas and isinstance(deltas[0], ToolCallDelta):
            self._deltas += deltas
            self._step = self._in_calls
        elif deltas:
            self._begin_answer(self._trial)

    def _begin_answer(self, beginning: str) -> None:
        self._text = beginning + self._text
        self._step = self._in_answer

    def _in_calls(self) -> bool:
        self._route(len(self._text))
        return False

    def _in_answer(self) -> bool:
        if self._text:
            self._deltas.append(ContentDelta(self._text))
        self._text = ""
        return False

    def _route(self, chars: int) -> None:
        """Pass the next text to the router; a call ends all other expectations."""
        text, self._text = self._text[:chars], self._text[chars:]
        deltas = self._router.feed(text) if text else []
        self._deltas += deltas
        if any(isinstance(delta, ToolCallDelta) for delta in deltas):
            self._step = self._in_calls


def _leading(text: str, marks: Sequence[str]) -> str | None:
    """Return the longest mark that a text begins with, or ""; `None` if more text decides."""
    if any(len(mark) > len(text) and mark.startswith(text) for mark in marks):
        return None
    return max(filter(text.startswith, marks), key=len, default="")
