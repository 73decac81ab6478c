"""Jamba, Hunyuan A13B and Apriel: a list of objects in `<tool_calls>`."""

from backend.formats.dialects import JSON_CALLS, Reading
from backend.formats.evidence import in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar
from backend.formats.objects.lists import list_of_calls

OPENER, CLOSER = "<tool_calls>", "</tool_calls>"

FORMAT = ToolFormat(
    name="json_list",
    aliases=("hunyuan_a13b", "jamba", "apriel"),
    clues=(in_template(OPENER),),
    openers=(OPENER,),
    closers=(CLOSER,),
    readings=(Reading(dialect=JSON_CALLS, end=CLOSER),),
    grammar=CallGrammar(frames=(list_of_calls(OPENER, CLOSER),)),
)
