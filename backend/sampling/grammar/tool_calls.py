"""The grammar of calls in a model's format, of text around them, and the parts it cannot hold."""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from backend.core.prompt import Tool
from backend.errors import GrammarError
from backend.formats.dialects import (
    ARGUMENTS,
    KEYS_BESIDE,
    NAME_KEYS,
    Literals,
    Messages,
    Reading,
    Slot,
    Tags,
    Template,
    split_at,
)
from backend.formats.format import Frame, Section, ToolFormat
from backend.sampling.grammar.compiler import Checker
from backend.sampling.grammar.schema import token
from backend.sampling.grammar.tool_arguments import arguments_in
from backend.sampling.grammar.tool_parameters import CallRule, Parameters, PartError, PerSchema
from backend.sampling.grammar.tool_values import CallSite, fill, json_text
from backend.sampling.grammar.vocabulary import Vocabulary
from backend.sampling.grammar.writer import (
    FreeText,
    GrammarWriter,
    LarkGrammar,
    Piece,
    alternatives,
    chain,
    escaped,
    repeated,
    sequence,
)

log = logging.getLogger(__name__)


class _AroundMessages:
    """Thoughts and preambles as messages before a call, which comes last, or an answer."""

    after = ""

    def __init__(self, messages: Messages, writer: GrammarWriter) -> None:
        self._messages = messages
        self._writer = writer
        self._text = FreeText(writer, messages.tokens)
        next_message = f"{messages.ends[0]}{messages.start}{messages.roles[0]}"
        heads = alternatives(map(writer.text, messages.heads))
        self._earlier = f"{writer.rule(chain(heads, self._text.alone, writer.text(next_message)))}*"

    @property
    def alone(self) -> str:
        end = self._writer.last_text(self._messages.last_ends[-1])
        answer = chain(self._writer.text(self._messages.answer), self._text.alone)
        return chain(self._earlier, answer, f"({end})?" if end else "")

    def before(self, end: str) -> str:
        return chain(self._earlier, self._writer.text(end))


class _AfterSection:
    """An answer in its own section, before the calls, which come last, or instead of them."""

    after = ""

    def __init__(self, section: Section, writer: GrammarWriter, ends: Sequence[str]) -> None:
        """Define the section; the answer does not contain any of `ends`."""
        self._section = section
        self._writer = writer
        self._text = FreeText(writer, (*ends, *filter(None, (section.begin, section.end))))
        begin = writer.text(section.begin)
        self._begin = f"({begin})?" if section.may_be_open else begin

    @property
    def alone(self) -> str:
        end = self._writer.text(self._section.end)
        return chain(self._begin, self._text.alone, f"({end})?" if self._section.closes else "")

    def before(self, end: str) -> str:
        section = chain(self._begin, self._text.before(self._section.end))
        return chain(f"({section})?", self._writer.text(end))


Surroundings: TypeAlias = _AroundMessages | _AfterSection | FreeText


def _empty_section(section: Section, writer: GrammarWriter) -> str:
    """Return the expression of an empty section, which models write before calls."""
    begin, end = writer.text(section.begin), writer.text(section.end)
    return f"(({begin})? {end})?" if section.may_be_open else ""


def _is_written(frame: Frame, vocabulary: Vocabulary) -> bool:
    """Return whether a model with these tokens writes calls in this frame."""
    markers = vocabulary.markers
    return not (frame.needs and frame.needs not in markers) and frame.lacks not in markers


class _FramedCalls:
    """Calls of some tools in a frame."""

    def __init__(
        self,
        frame: Frame,
        tool_format: ToolFormat,
        tools: Sequence[Parameters],
        writer: GrammarWriter,
    ) -> None:
        """Define the arguments of the tools.

        Raises:
            GrammarError: The arguments of a tool cannot be enforced.
        """
        self.frame = frame
        self._writer = writer
        call = frame.call or frame.dialect.call
        self._call, after = split_at(call, ARGUMENTS)
        self._site = call_site(frame, tool_format, after)
        self._arguments = [(tool.tool, self._arguments_of(tool)) for tool in tools]

    def _arguments_of(self, tool: Parameters) -> str:
        """Return the expression of a tool's arguments; those of a lapse are held less strictly."""
        try:
            return arguments_in(self.frame.dialect, self._site, tool, self._writer)
        except PartError as error:
            if not self.frame.is_lapse:
                raise
            return self._arguments_of(tool.without(error.pointer, "cannot be held in a lapse"))

    def whole(self, least: int, most: int) -> str:
        """Return the expression of `least` to `most` calls (at least one) with their opener."""
        return self._calls((self.frame.opener, *self.frame.begin), least, most)

    def after_opener(self, least: int, most: int) -> str:
        """Return the expression of `least` to `most` calls (at least one) without the opener."""
        return self._calls(self.frame.begin, least, most)

    def _calls(self, begin: Template, least: int, most: int) -> str:
        frame = self.frame
        first = self._any_call((*begin, *_without(frame.opener, self._call)))
        other = self._any_call((*frame.separator, *self._call))
        others = repeated(other, max(least - 1, 0), most - 1)
        return chain(first, others, self._writer.last_text(frame.end))

    def _any_call(self, template: Template) -> str:
        return self._writer.rule(alternatives(self._each_call(template)))

    def _each_call(self, template: Template) -> Iterator[str]:
        for name, arguments in self._arguments:
            dialect = self.frame.dialect
            spelled = dialect.spelled(name) if isinstance(dialect, Tags) else name
            values: dict[Slot, Piece] = {Slot.NAME: spelled, Slot.QUOTED_NAME: json_text(name)}
            yield chain(sequence(fill(template, values, self._writer)), arguments)


def call_site(frame: Frame, tool_format: ToolFormat, after: Template) -> CallSite:
    """Return the surroundings of the arguments in a frame."""
    if isinstance(around := tool_format.around, Messages):
        reading = around.calls or Reading(frame.dialect)
        opener = next(iter(reading.openers), frame.opener)
        return CallSite(reading, opener, after, tuple((token,) for token in around.tokens))
    for reading in tool_format.readings:
        is_opened = not reading.openers or frame.opener in reading.openers
        if reading.dialect is frame.dialect and is_opened:
            return CallSite(reading, frame.opener, after)
    return CallSite(Reading(frame.dialect), frame.opener, after)


def _without(opener: str, call: Template) -> Template:
    """Return the rest of a call after its opener, which may be the call's beginning."""
    first, *rest = call
    if isinstance(first, str) and first.startswith(opener):
        return (first.removeprefix(opener), *rest)
    return call


_BRACKETS = frozenset("[{")
_OBJECT_LEAD = rf"\[?\s*\{{+\s*\x22({'|'.join((*NAME_KEYS, *KEYS_BESIDE))})\x22"
_PYTHON_LEAD = r"\[\s*[\w.\x2f-]+\("


def call_grammar(
    tool_format: ToolFormat, tools: Sequence[Parameters], rule: CallRule, vocabulary: Vocabulary
) -> LarkGrammar | None:
    """Return the grammar of replies that call tools; `None` for a format without a grammar.

    Args:
        tools: Their parameters, `writable` in the format.
    """
    if not tool_format.frames:
        return None
    return _ToolGrammar(tool_format, tools, rule, vocabulary).written()


def writable(tool_format: ToolFormat, parameters: Parameters, vocabulary: Vocabulary) -> Parameters:
    """Return the parameters of a tool as far as a format can express them.

    Each part that it cannot express is left out, which at worst leaves an object of any arguments.
    A part that only a lapse cannot express is left out there.
    """
    for frame in tool_format.frames:
        if frame.is_lapse or not _is_written(frame, vocabulary):
            continue
        while problem := _problem(frame, tool_format, parameters, vocabulary):
            parameters = parameters.without(problem.pointer, "cannot be held in this format")
    return parameters


def _problem(
    frame: Frame, tool_format: ToolFormat, parameters: Parameters, vocabulary: Vocabulary
) -> PartError | None:
    """Return the first part of a tool's schema that a frame cannot express, if any."""
    try:
        _FramedCalls(frame, tool_format, [parameters], GrammarWriter("call", vocabulary))
    except PartError as error:
        return error
    return None


class _ToolGrammar:
    """Combines calls and the text around them."""

    def __init__(
        self,
        tool_format: ToolFormat,
        tools: Sequence[Parameters],
        rule: CallRule,
        vocabulary: Vocabulary,
    ) -> None:
        frames = [frame for frame in tool_format.frames if _is_written(frame, vocabulary)]
        if not rule.has_text:
            frames = [frame for frame in frames if not frame.is_lapse]
        self._format = tool_format
        self._writer = GrammarWriter("call", vocabulary)
        self._frames = [_FramedCalls(frame, tool_format, tools, self._writer) for frame in frames]
        self._least = rule.least
        self._most = min(rule.most, tool_format.most_calls or rule.most)
        self._has_text = rule.has_text
        self._names = [each.tool for each in tools]

    def written(self) -> LarkGrammar:
        ways = self._among_text() if self._has_text else self._calls_only()
        return self._writer.grammar(alternatives(ways))

    def _calls_only(self) -> Iterator[str]:
        around = self._format.around
        before = _empty_section(around, self._writer) if isinstance(around, Section) else ""
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
        match self._format.around:
            case Messages() as messages:
                return _AroundMessages(messages, self._writer)
            case Section() as section:
                return _AfterSection(section, self._writer, openers)
        return FreeText(self._writer, openers, never_first=_lead(self._format, self._names))

    def _single(self, calls: _FramedCalls, around: Surroundings) -> str:
        """Return the expression of text followed by one call."""
        return chain(around.before(calls.frame.opener), calls.after_opener(1, 1))


def _is_single(calls: _FramedCalls) -> bool:
    return not (calls.frame.is_block or calls.frame.is_lead)


def _lead(tool_format: ToolFormat, names: Sequence[str]) -> str:
    """Return a regular expression for text that readers mistake for the beginning of a call."""
    leads = []
    if tool_format.names_lead_json:
        # Another word there is the name of a tool that is not offered.
        words = "|".join((r"\S+", *map(escaped, names)))
        leads.append(f"({words}){escaped(tool_format.name_lead)}")
    for lead in tool_format.leads:
        if lead not in _BRACKETS:
            leads.append(escaped(lead))
        elif any(isinstance(reading.dialect, Literals) for reading in tool_format.readings):
            leads.append(_PYTHON_LEAD)
        else:
            leads.append(_OBJECT_LEAD)
    return "|".join(dict.fromkeys(leads))


_MAX_LOGGED = 8
_ONE_CALL = CallRule(least=1, most=1, has_text=False)
# The search for a part ends here; a part not found by then is left out with all around it.
_MAX_CHECKS = 200
# For one tool, and for all tools of a request.
_SEARCH_S, _ALL_SEARCHES_S = 2.0, 8.0
_NOT_COMPILED = "cannot be compiled"
_KEPT = frozenset({"type", "$defs", "additionalProperties"})


class _HeldTool:
    """The parameters of one tool, as they are enforced."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self._is_compiled = False
        self._is_logged = False

    def weaken(self, is_sound: Callable[[Parameters], bool], until_s: float = math.inf) -> bool:
        """Leave out parts that cannot be compiled, searching until a time; return whether any."""
        if self._is_compiled:
            return False
        before = self.parameters
        until_s = min(until_s, time.monotonic() + _SEARCH_S)
        self.parameters, self._is_compiled = _Search(is_sound, before, until_s).weakened(), True
        return self.parameters is not before

    @property
    def size(self) -> int:
        """Length of its schema; 0 if any arguments are allowed."""
        return 0 if self.parameters.is_open else len(json.dumps(self.parameters.schema))

    def opened(self) -> "_HeldTool":
        """Return the same tool with any arguments, for one request."""
        twin = _HeldTool(self.parameters.without("#", "is too large beside other tools"))
        twin._is_compiled, twin._is_logged = True, self._is_logged
        self._is_logged = True
        return twin

    def log_notes(self) -> None:
        """Log once the parts that are not enforced."""
        if (notes := self.parameters.notes) and not self._is_logged:
            self._is_logged = True
            log.info("tool %r: not enforced: %s", self.parameters.tool, _list(notes))


class HeldTools:
    """Knows the parts of each tool's schema that one model can be held to; thread-safe."""

    def __init__(
        self, tool_format: ToolFormat, checker: Checker, parameters: PerSchema[Parameters]
    ) -> None:
        self._format = tool_format
        self._checker = checker
        self._parameters = parameters
        self._known = PerSchema(self._read)

    def offered(self, tools: Sequence[Tool]) -> "_OfferedTools":
        """Return the tools of a request."""
        return _OfferedTools(self._format, self._checker, tools, self._known.of)

    def _read(self, tool: Tool) -> _HeldTool:
        parameters = self._parameters.of(tool)
        held = _HeldTool(writable(self._format, parameters, self._checker.vocabulary))
        # A terminal that matches nothing compiles, and would be noticed in the middle of a call.
        if self._has_raw_text and held.parameters.may_lack_texts:
            held.weaken(partial(_is_sound, self._format, self._checker))
        return held

    @property
    def _has_raw_text(self) -> bool:
        return any(isinstance(each.dialect, Tags | Literals) for each in self._format.frames)


def _is_sound(tool_format: ToolFormat, checker: Checker, parameters: Parameters) -> bool:
    """Return whether calls with these parameters compile, and can be completed."""
    grammar = call_grammar(tool_format, [parameters], _ONE_CALL, checker.vocabulary)
    if grammar is None:
        return True
    texts = [line for line in grammar.definitions if line[0].isupper() and " & " in line]
    try:
        checker.check(grammar)
        for line in texts:
            checker.check(LarkGrammar(line.partition(":")[0], (line,)))
    except GrammarError:
        return False
    return True


class _OfferedTools:
    """The tools of one request, those without those that no arguments fit."""

    def __init__(
        self,
        tool_format: ToolFormat,
        checker: Checker,
        tools: Sequence[Tool],
        known: Callable[[Tool], _HeldTool],
    ) -> None:
        self._format = tool_format
        self._checker = checker
        self._until_s = time.monotonic() + _ALL_SEARCHES_S
        self.held: list[_HeldTool] = []
        self._refusals: list[PartError] = []
        for tool in tools:
            try:
                self.held.append(known(tool))
            except PartError as error:
                self._refusals.append(error)

    def grammar(self, rule: CallRule) -> LarkGrammar | None:
        """Return the grammar of calls; `None` for a format without a grammar.

        Raises:
            PartError: No tool can be called; the message names the first.
        """
        if not self.held and self._format.frames:
            raise self._refusals[0]
        parameters = [held.parameters for held in self.held]
        return call_grammar(self._format, parameters, rule, self._checker.vocabulary)

    def weaken(self) -> bool:
        """Leave out parts that cannot be compiled; return whether a grammar would be another now.

        If every tool can be compiled by itself, the larger half of them gets open arguments.
        """
        is_sound = partial(_is_sound, self._format, self._checker)
        if sum(held.weaken(is_sound, self._until_s) for held in self.held):
            return True
        sizes = sorted(held.size for held in self.held if held.size)
        if sizes:
            middle = sizes[len(sizes) // 2]
            self.held = [held.opened() if held.size >= middle else held for held in self.held]
        return bool(sizes)

    def log_notes(self) -> None:
        for held in self.held:
            held.log_notes()


class _Search:
    """Finds the parts of a schema that cannot be compiled, from the outside inwards."""

    def __init__(
        self, is_sound: Callable[[Parameters], bool], parameters: Parameters, until_s: float
    ) -> None:
        self._check = is_sound
        self._parameters = parameters
        self._left = _MAX_CHECKS
        self._until_s = until_s

    def weakened(self) -> Parameters:
        """Return the parameters without the parts that cannot be compiled."""
        if self._check(self._parameters):
            return self._parameters
        for name in self._parameters.schema.get("$defs", {}):
            self._weaken(f"#/$defs/{name}")
        for pointer in self._inner("#"):
            self._weaken(pointer)
        if not self._check(self._parameters):
            self._loosen("#", lambda: self._check(self._parameters))
        return self._parameters

    def _weaken(self, pointer: str) -> None:
        """Leave out some of a part of the schema, or all of it, so that it compiles."""
        if self._is_sound(pointer):
            return
        for inner in self._inner(pointer):
            self._weaken(inner)
        if not self._is_sound(pointer):
            self._loosen(pointer, lambda: self._is_sound(pointer))

    def _loosen(self, pointer: str, is_sound: Callable[[], bool]) -> None:
        """Leave out one of the keywords of a schema, or else the schema."""
        whole, schema = self._parameters, self._parameters.at(pointer)
        keywords = set() if self._is_over else schema.keys() - _KEPT
        for keyword in sorted(keywords):
            self._parameters = whole.without(f"{pointer}/{keyword}", _NOT_COMPILED)
            if is_sound():
                return
        self._parameters = whole.without(pointer, _NOT_COMPILED)

    def _is_sound(self, pointer: str) -> bool:
        """Return whether a part of the schema compiles as the only argument, or inside of it."""
        part = self._parameters.at(pointer)
        if isinstance(part, bool):
            return True
        self._left -= 1
        if self._is_over:
            return False
        is_inside = pointer.count("/") > len(("properties", "name"))
        inside = {"type": "array", "items": part, "minItems": 1}
        alone = {
            "type": "object",
            "properties": {"value": inside if is_inside else part},
            "required": ["value"],
            "additionalProperties": False,
            "$defs": self._parameters.schema.get("$defs", {}),
        }
        return self._check(Parameters(self._parameters.tool, alone))

    @property
    def _is_over(self) -> bool:
        return self._left < 0 or time.monotonic() > self._until_s

    def _inner(self, pointer: str) -> Iterator[str]:
        """Yield the pointers of the schemas in a schema."""
        schema = self._parameters.at(pointer)
        if not isinstance(schema, Mapping):
            return
        for keyword in ("properties", "patternProperties"):
            for name in schema.get(keyword, {}):
                yield f"{pointer}/{keyword}/{token(name)}"
        for keyword in ("anyOf", "prefixItems"):
            for index in range(len(schema.get(keyword, ()))):
                yield f"{pointer}/{keyword}/{index}"
        for keyword in ("items", "additionalProperties"):
            if isinstance(schema.get(keyword), Mapping):
                yield f"{pointer}/{keyword}"


def _list(notes: Mapping[str, str]) -> str:
    entries = [f"{place!r} ({reason})" for place, reason in notes.items()]
    more = [f"and {len(entries) - _MAX_LOGGED} more"] if len(entries) > _MAX_LOGGED else []
    return ", ".join(entries[:_MAX_LOGGED] + more)
