"""Find how a model writes from its own evidence: its vocabulary and its chat template."""

from backend.output.evidence import FormatEvidence, find, warn_once
from backend.output.format import NO_REASONING, NO_TOOLS, OutputFormat, ToolFormat
from backend.output.reasoning_rows import REASONING_ROWS
from backend.output.tool_rows import TOOL_ROWS


def detect(evidence: FormatEvidence) -> OutputFormat:
    """Find the format of a model, each half for itself; what nothing tells is plain content."""
    reasoning = find(REASONING_ROWS, evidence.reasoning_parser, evidence) or NO_REASONING
    tools = find(TOOL_ROWS, evidence.tool_parser, evidence)
    if _calls_are_lost(tools, evidence):
        name = tools.name if tools else "unknown"
        warn_once(f"tool calls of the {name} format cannot be read: they pass as content")
    return OutputFormat(reasoning, tools or NO_TOOLS)


def _calls_are_lost(tools: ToolFormat | None, evidence: FormatEvidence) -> bool:
    """Tell whether a model seems to call tools in a way that nothing here reads."""
    if tools is None:
        return "tool_calls" in evidence.chat_template
    return tools.make_cursor is None and tools is not NO_TOOLS
