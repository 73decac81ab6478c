"""Detects a model's format from its chat template and vocabulary."""

import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from backend.core.prompt import EXAMPLE_CALL, EXAMPLE_TOOL
from backend.core.step import Delta, ToolCallDelta
from backend.formats.dialects import (
    Characters,
    Dialect,
    Id,
    Maybe,
    Part,
    Slot,
    Tags,
    Template,
    split_at,
    text_of,
)
from backend.formats.format import (
    FORCED,
    NO_REASONING,
    NO_TOOLS,
    FormatEvidence,
    ReasoningFormat,
    ToolFormat,
)
from backend.formats.registry import REASONING_FORMATS, TOOL_FORMATS
from backend.formats.spelling import Spelling, spelling_in
from backend.output.reply_format import OutputFormat, warn_once
from backend.output.router import Router

_ARGUMENTS = json.loads(EXAMPLE_CALL.arguments)
_SLOTS = {
    Slot.NAME: EXAMPLE_CALL.name,
    Slot.QUOTED_NAME: f'"{EXAMPLE_CALL.name}"',
    Slot.ARGUMENTS: ".*".join(("", *(word for pair in _ARGUMENTS.items() for word in pair), "")),
    Slot.INDEX: r"\d+",
}

log = logging.getLogger(__name__)


def find_by_call(formats: Sequence[ToolFormat], written_call: str) -> ToolFormat | None:
    """Return the format that writes most nearly this call, and reads it.

    Of equal ones it is the first that writes it in this layout.
    """
    found = {known.name: _closeness(known, written_call) for known in formats}
    best = max(found.values(), default=0)
    close = [known for known in formats if best and found[known.name] == best]
    exact = (known for known in close if _has_layout(known, written_call))
    return next(exact, next(iter(close), None))


def _has_layout(tool_format: ToolFormat, written_call: str) -> bool:
    """Tell whether a text has a call of a format with the blanks and lines around its parts."""
    return any(
        re.search(_layout(frame.first_call, frame.dialect), written_call)
        for frame in tool_format.frames
        if not frame.is_lapse
    )


def _layout(template: Template, dialect: Dialect) -> str:
    """Return the pattern of a call, with that of an argument in tags."""
    if isinstance(dialect, Tags):
        before, after = split_at(template, Slot.ARGUMENTS)
        template = (*before, *dialect.parameter, *after)
    return _pattern(template, re.escape)


def _closeness(tool_format: ToolFormat, written_call: str) -> int:
    """Return how many fixed characters of a format's call occur in a text that it reads."""
    text = _squeezed(written_call)
    lengths = [
        len(_squeezed(text_of(whole)))
        for whole in (
            (*frame.first_call, frame.end) for frame in tool_format.frames if not frame.is_lapse
        )
        if re.search(_pattern(whole), text)
    ]
    return max(lengths) if lengths and _can_read(tool_format, written_call) else 0


def _can_read(tool_format: ToolFormat, written_call: str) -> bool:
    """Tell whether a format reads `EXAMPLE_CALL`, and no other call, in a text."""
    tools = {EXAMPLE_TOOL.name: EXAMPLE_TOOL.parameters}
    router = Router(OutputFormat(NO_REASONING, tool_format), tools=tools)
    deltas = [*router.feed(written_call), *router.finish(truncated=False)]
    is_whole = router.completed_calls == {0}
    return is_whole and _call_of(deltas) == (EXAMPLE_CALL.name, _ARGUMENTS)


def _call_of(deltas: Iterable[Delta]) -> tuple[str, object]:
    pieces = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
    name = "".join(piece.name for piece in pieces)
    return name, json.loads("".join(piece.arguments for piece in pieces))


def _squeezed_literal(text: str) -> str:
    return re.escape(_squeezed(text))


def _pattern(template: Template, literal: Callable[[str], str] = _squeezed_literal) -> str:
    return "".join(_part_pattern(part, literal) for part in template)


def _part_pattern(part: Part, literal: Callable[[str], str]) -> str:
    match part:
        case str():
            return literal(part)
        case Slot():
            return _SLOTS.get(part, ".*")
        case Maybe(template):
            return f"(?:{_pattern(template, literal)})?"
        case Id(template):
            return _pattern(template, literal)
        case Characters(pattern):
            return f"(?:{pattern})"


def _squeezed(text: str) -> str:
    """Return a text without whitespace, in which templates and models vary."""
    return "".join(text.split())


def spelling_of(
    tool_format: ToolFormat, has: Callable[[str], bool] = lambda _: False
) -> Spelling | None:
    """Return how a model writes calls, if that can be told and its format reads them so.

    Args:
        has: Tells whether the model has a marker.
    """
    example = {"name": EXAMPLE_CALL.name, "arguments": _ARGUMENTS}
    for frame in tool_format.frames:
        is_own = not frame.needs or has(frame.needs)
        if frame.is_lapse or not is_own or (frame.lacks and has(frame.lacks)):
            continue
        spelling = spelling_in(frame)
        if spelling is not None and _can_read(tool_format, spelling.written([example])):
            return spelling
    return None


FormatT = TypeVar("FormatT", ReasoningFormat, ToolFormat)


def detect(evidence: FormatEvidence) -> OutputFormat:
    """Detect the formats of thoughts and calls; without evidence a reply is plain content.

    An option that names a thought format or forces a tool format wins. Otherwise the tool format is
    determined by the call that the template renders, then by clues in the template and vocabulary,
    then by an option that only hints at one.
    """
    reasoning = find(REASONING_FORMATS, evidence.reasoning_parser, evidence) or NO_REASONING
    tools, source = _tools(evidence)
    if tools is None and "tool_calls" in evidence.chat_template:
        warn_once("tool calls of an unknown format cannot be read: they pass as content")
    if tools is not None:
        log.info("the format of tool calls is %s, %s", tools.name, source)
    return OutputFormat(reasoning, tools or NO_TOOLS)


def _tools(evidence: FormatEvidence) -> tuple[ToolFormat | None, str]:
    """Return the tool format, if known, and the source of that knowledge."""
    hint = evidence.tool_parser and evidence.tool_parser.removesuffix(FORCED)
    named = _named(TOOL_FORMATS, hint)
    if named is NO_TOOLS or (named and hint != evidence.tool_parser):
        return named, "by an option"
    written = find_by_call(TOOL_FORMATS, evidence.written_call) if evidence.written_call else None
    evident = written or _fitting(TOOL_FORMATS, evidence)
    if evident is None or evident is named:
        return named, "by an option"
    if named is not None:
        # The host's importer guesses a parser from the name of the model, and is wrong where a
        # family changed its format: deepseek_v3 for DSML, minimax_m2 for MiniMax M3.
        warn_once(
            f"tool_parser {hint!r} contradicts the model's own evidence of {evident.name}, which "
            f"wins; tool_parser!:{hint} forces it"
        )
    if written and evidence.is_told_here:
        return evident, "in which the tools are written"
    return evident, "by the call in its template" if written else "by clues"


def find(
    formats: Sequence[FormatT], override: str | None, evidence: FormatEvidence
) -> FormatT | None:
    """Return the named format, or else the first that fits."""
    return _named(formats, override) or _fitting(formats, evidence)


def _named(formats: Sequence[FormatT], name: str | None) -> FormatT | None:
    if name is None:
        return None
    found = next((known for known in formats if known.is_called(name)), None)
    if found is None:
        warn_once(f"unknown parser {name!r}: using the model's own evidence")
    return found


def _fitting(formats: Sequence[FormatT], evidence: FormatEvidence) -> FormatT | None:
    return next((own for known in formats if (own := known.of(evidence))), None)
