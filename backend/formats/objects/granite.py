"""Granite 3: a list of objects after a token, or bare."""

from backend.formats.dialects import JSON_CALLS, Reading
from backend.formats.evidence import in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar
from backend.formats.objects.lists import list_of_calls

OPENER = "<|tool_call|>"

FORMAT = ToolFormat(
    name="granite",
    aliases=("granite3",),
    clues=(in_template(OPENER, "<|start_of_role|>"),),
    openers=(OPENER, "<tool_call>", "<function_call>"),
    leads=("[",),
    readings=(Reading(dialect=JSON_CALLS),),
    grammar=CallGrammar(frames=(list_of_calls(OPENER),)),
)
