"""Phi 4 mini: a list of objects between tokens, after `functools`, or bare."""

from backend.formats.dialects import JSON_CALLS, Reading
from backend.formats.evidence import in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar
from backend.formats.objects.lists import list_of_calls

OPENER, CLOSER = "<|tool_call|>", "<|/tool_call|>"
FUNCTOOLS = "functools["

FORMAT = ToolFormat(
    name="phi4",
    aliases=("phi4_mini_json", "phi4_mini"),
    clues=(in_template(OPENER, "<|tool|>"), in_template(FUNCTOOLS)),
    openers=(OPENER, FUNCTOOLS),
    leads=("{", "["),
    closers=(CLOSER,),
    readings=(Reading(dialect=JSON_CALLS, end=CLOSER),),
    grammar=CallGrammar(frames=(list_of_calls(OPENER, CLOSER),)),
)
