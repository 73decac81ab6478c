"""Detects a model's format from its chat template and vocabulary."""

import logging
from collections.abc import Sequence
from typing import TypeVar

from backend.formats.evidence import FORCED, FormatEvidence
from backend.formats.format import NO_REASONING, NO_TOOLS, ReasoningFormat, ToolFormat
from backend.formats.registry import REASONING_FORMATS, TOOL_FORMATS
from backend.output.format import OutputFormat
from backend.output.warn import warn_once
from backend.output.written_call import find_by_call

log = logging.getLogger(__name__)

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
        log.info("the format of tool calls is %s, by %s", tools.name, source)
    return OutputFormat(reasoning, tools or NO_TOOLS)


def _tools(evidence: FormatEvidence) -> tuple[ToolFormat | None, str]:
    """Return the tool format, if known, and the source of that knowledge."""
    hint = evidence.tool_parser and evidence.tool_parser.removesuffix(FORCED)
    named = _named(TOOL_FORMATS, hint)
    if named is NO_TOOLS or (named and hint != evidence.tool_parser):
        return named, "an option"
    written = find_by_call(TOOL_FORMATS, evidence.written_call) if evidence.written_call else None
    told = written or _fitting(TOOL_FORMATS, evidence)
    if told is None or told is named:
        return named, "an option"
    if named is not None:
        # The host's importer guesses a parser from the name of the model, and is wrong where a
        # family changed its format: deepseek_v3 for DSML, minimax_m2 for MiniMax M3.
        warn_once(
            f"tool_parser {hint!r} contradicts the model's own evidence of {told.name}, which "
            f"wins; tool_parser!:{hint} forces it"
        )
    return told, "the call in its template" if written else "clues"


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
