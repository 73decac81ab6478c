"""Grammars of tool calls, from the caller's tools and tool choice."""

from collections.abc import Iterator, Sequence

from backend.core.prompt import Tool
from backend.formats.dialects import Literals, Messages
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame, Section
from backend.sampling.grammar.free_text import FreeText
from backend.sampling.grammar.lark import LarkGrammar
from backend.sampling.grammar.tools.frame import FramedCalls, is_written
from backend.sampling.grammar.tools.parameters import Parameters, PartError
from backend.sampling.grammar.tools.rule import CallRule
from backend.sampling.grammar.tools.surroundings import (
    AfterSection,
    AroundMessages,
    Surroundings,
    empty_section,
)
from backend.sampling.grammar.vocabulary import Vocabulary
from backend.sampling.grammar.writer import (
    GrammarWriter,
    alternatives,
    chain,
    escaped,
    repeated,
)

_BRACKETS = frozenset("[{")
_OBJECT_LEAD = r"\[?\s*\{+\s*\x22(name|function|type|id|index)\x22"
_PYTHON_LEAD = r"\[\s*[\w.\x2f-]+\("


def tool_grammar(
    tool_format: ToolFormat, tools: Sequence[Tool], rule: CallRule, vocabulary: Vocabulary
) -> LarkGrammar | None:
    """Return the grammar of replies that call these tools, in a model's format.

    Returns:
        `None` for a format without a grammar.

    Raises:
        GrammarError: A tool cannot be called with any arguments; the message says which.
    """
    held = [writable(tool_format, Parameters.of(tool), vocabulary) for tool in tools]
    return call_grammar(tool_format, held, rule, vocabulary)


def call_grammar(
    tool_format: ToolFormat,
    tools: Sequence[Parameters],
    rule: CallRule,
    vocabulary: Vocabulary,
) -> LarkGrammar | None:
    """Return the same for tools whose parameters are writable in the format."""
    if tool_format.grammar is None:
        return None
    return _ToolGrammar(tool_format, tool_format.grammar, tools, rule, vocabulary).written()


def writable(tool_format: ToolFormat, parameters: Parameters, vocabulary: Vocabulary) -> Parameters:
    """Return the parameters of a tool as far as a format can express them.

    Each part that it cannot express is left out, which at worst leaves an object of any arguments.
    What only a lapse cannot express is left out there.
    """
    frames = tool_format.grammar.frames if tool_format.grammar else ()
    for frame in frames:
        if frame.is_lapse or not is_written(frame, vocabulary):
            continue
        while problem := _problem(frame, tool_format, parameters, vocabulary):
            parameters = parameters.without(problem.pointer, "cannot be held in this format")
    return parameters


def _problem(
    frame: Frame, tool_format: ToolFormat, parameters: Parameters, vocabulary: Vocabulary
) -> PartError | None:
    """Return the first part of a tool's schema that a frame cannot express, if any."""
    try:
        FramedCalls(frame, tool_format, [parameters], GrammarWriter("call", vocabulary))
    except PartError as error:
        return error
    return None


class _ToolGrammar:
    """Combines calls and the text around them."""

    def __init__(
        self,
        tool_format: ToolFormat,
        grammar: CallGrammar,
        tools: Sequence[Parameters],
        rule: CallRule,
        vocabulary: Vocabulary,
    ) -> None:
        frames = [frame for frame in grammar.frames if is_written(frame, vocabulary)]
        if not rule.has_text:
            frames = [frame for frame in frames if not frame.is_lapse]
        self._format = tool_format
        self._around = grammar.around
        self._writer = GrammarWriter("call", vocabulary)
        self._frames = [FramedCalls(frame, tool_format, tools, self._writer) for frame in frames]
        self._least = rule.least
        self._most = rule.most if grammar.most_calls is None else min(rule.most, grammar.most_calls)
        self._has_text = rule.has_text

    def written(self) -> LarkGrammar:
        ways = self._among_text() if self._has_text else self._calls_only()
        return self._writer.grammar(alternatives(ways))

    def _calls_only(self) -> Iterator[str]:
        section = isinstance(self._around, Section) and self._around
        before = empty_section(section, self._writer) if section else ""
        for calls in self._frames:
            yield chain(before, calls.whole(self._least, self._most))
        if not self._least:
            yield ""

    def _among_text(self) -> Iterator[str]:
        around = self._surroundings()
        for calls in self._frames:
            if calls.frame.is_lead:
                yield calls.whole(self._least, self._most)
            elif calls.frame.is_block:
                before = around.before(calls.frame.opener)
                yield chain(before, calls.after_opener(self._least, self._most), around.after)
        if singles := [calls for calls in self._frames if _is_single(calls)]:
            call = alternatives(self._single(calls, around) for calls in singles)
            yield chain(repeated(call, self._least, self._most), around.after)
        elif not self._least:
            yield around.alone

    def _surroundings(self) -> Surroundings:
        openers = self._format.openers
        match self._around:
            case Messages():
                return AroundMessages(self._around, self._writer)
            case Section():
                return AfterSection(self._around, self._writer, openers)
        return FreeText(self._writer, openers, never_first=_lead(self._format))

    def _single(self, calls: FramedCalls, around: Surroundings) -> str:
        """Return the expression of text followed by one call."""
        return chain(around.before(calls.frame.opener), calls.after_opener(1, 1))


def _is_single(calls: FramedCalls) -> bool:
    return not (calls.frame.is_block or calls.frame.is_lead)


def _lead(tool_format: ToolFormat) -> str:
    """Return a regular expression for text that readers mistake for the beginning of a call."""
    leads = []
    for lead in tool_format.leads:
        if lead not in _BRACKETS:
            leads.append(escaped(lead))
        elif any(isinstance(reading.dialect, Literals) for reading in tool_format.readings):
            leads.append(_PYTHON_LEAD)
        else:
            leads.append(_OBJECT_LEAD)
    return "|".join(dict.fromkeys(leads))
