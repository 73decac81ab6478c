"""Granite 3: a list of objects after a token or bare, or bare lines of calls in Python."""

from backend.formats.dialects import JSON_CALLS, Reading
from backend.formats.evidence import in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar
from backend.formats.literal.pythonic import CALLS
from backend.formats.objects.lists import list_of_calls

OPENER, END = "<|tool_call|>", "<|end_of_text|>"
PYTHON = "("

FORMAT = ToolFormat(
    name="granite",
    aliases=("granite3",),
    clues=(in_template(OPENER, "<|start_of_role|>"),),
    openers=(OPENER, "<tool_call>", "<function_call>"),
    leads=("[",),
    name_lead=PYTHON,
    readings=(
        # Only the end of the reply ends the lines.
        Reading(dialect=CALLS, openers=(PYTHON,), end=END),
        Reading(dialect=JSON_CALLS),
    ),
    grammar=CallGrammar(frames=(list_of_calls(OPENER),)),
)
