"""Find how a model writes from its own evidence: its vocabulary and its chat template."""

from backend.output.evidence import FormatEvidence, find, warn_once
from backend.output.format import NO_REASONING, NO_TOOLS, OutputFormat
from backend.output.reasoning_rows import REASONING_ROWS
from backend.output.tool_rows import TOOL_ROWS


def detect(evidence: FormatEvidence) -> OutputFormat:
    """Find the format of a model, each half for itself; what nothing tells is plain content."""
    reasoning = find(REASONING_ROWS, evidence.reasoning_parser, evidence) or NO_REASONING
    tools = find(TOOL_ROWS, evidence.tool_parser, evidence)
    if tools is None and "tool_calls" in evidence.chat_template:
        warn_once("tool calls of an unknown format cannot be read: they pass as content")
    return OutputFormat(reasoning, tools or NO_TOOLS)
