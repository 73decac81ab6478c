"""Grammars of tool calls: what a model may write, given the tools and the caller's choice."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backend.core.prompt import Tool, ToolChoice, ToolMode
from backend.sampling.grammar.call_frame import FramedCalls
from backend.sampling.grammar.lark import LarkGrammar
from backend.sampling.grammar.tool_parameters import Parameters
from backend.sampling.grammar.tool_wire import Surroundings, ToolWire
from backend.sampling.grammar.tool_wires import TOOL_WIRES
from backend.sampling.grammar.vocabulary import Vocabulary
from backend.sampling.grammar.writer import GrammarWriter, alternatives, chain, repeated

MAX_PARALLEL_CALLS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRule:
    """How many calls a reply has.

    Attributes:
        least: How many at least.
        most: And at most: without a limit, a model at a high temperature does not come to an end.
        has_text: Whether there may be text around calls; else there is nothing but calls.
    """

    least: int = 0
    most: int = MAX_PARALLEL_CALLS
    has_text: bool = True

    @classmethod
    def of(cls, choice: ToolChoice, most: int = MAX_PARALLEL_CALLS) -> "CallRule":
        """Return the rule of a caller's choice; which tools it allows is another matter."""
        is_forced = choice.mode in (ToolMode.REQUIRED, ToolMode.NAMED)
        return cls(least=int(is_forced), most=most, has_text=not is_forced)


def tool_grammar(
    wire: str, tools: Sequence[Tool], rule: CallRule, vocabulary: Vocabulary
) -> LarkGrammar | None:
    """Return the grammar of replies that call these tools, in the wire of a model.

    Args:
        wire: The name of the row among the tool formats.
        tools: At least one; those that may be called.
        rule: How many calls there are.
        vocabulary: Tells which markers are tokens.

    Returns:
        Nothing for a wire without a grammar.

    Raises:
        GrammarError: The parameters of a tool cannot be enforced; the message says which.
    """
    if wire not in TOOL_WIRES:
        return None
    return _ToolGrammar(TOOL_WIRES[wire], tools, rule, vocabulary).written()


class _ToolGrammar:
    """Puts calls and what may surround them together."""

    def __init__(
        self, wire: ToolWire, tools: Sequence[Tool], rule: CallRule, vocabulary: Vocabulary
    ) -> None:
        parameters = [Parameters.of(tool) for tool in tools]
        frames = [frame for frame in wire.frames if frame.fits(vocabulary)]
        if not rule.has_text:
            frames = [frame for frame in frames if not frame.is_lapse]
        self._wire = wire
        self._writer = GrammarWriter("call", vocabulary)
        self._frames = [FramedCalls(frame, parameters, self._writer) for frame in frames]
        self._least = rule.least
        self._most = rule.most if wire.most_calls is None else min(rule.most, wire.most_calls)
        self._has_text = rule.has_text

    def written(self) -> LarkGrammar:
        ways = self._among_text() if self._has_text else self._calls_only()
        return self._writer.grammar(alternatives(ways))

    def _calls_only(self) -> Iterator[str]:
        for calls in self._frames:
            yield calls.whole(self._least, self._most)
        if not self._least:
            yield ""

    def _among_text(self) -> Iterator[str]:
        openers = [calls.frame.opener for calls in self._frames if not calls.frame.is_lead]
        around = self._wire.surroundings(
            self._writer, (*openers, *self._wire.taboos), never_first=self._wire.lead
        )
        for calls in self._frames:
            if calls.frame.is_lead:
                yield calls.whole(self._least, self._most)
            elif calls.frame.is_block:
                before = around.before(calls.frame.opener)
                yield chain(before, calls.behind_opener(self._least, self._most), around.after)
        if singles := [calls for calls in self._frames if _is_single(calls)]:
            call = alternatives(self._single(calls, around) for calls in singles)
            yield chain(repeated(call, self._least, self._most), around.after)
        elif not self._least:
            yield around.alone

    def _single(self, calls: FramedCalls, around: Surroundings) -> str:
        """Return the expression of text and one call behind it."""
        return chain(around.before(calls.frame.opener), calls.behind_opener(1, 1))


def _is_single(calls: FramedCalls) -> bool:
    return not (calls.frame.is_block or calls.frame.is_lead)
