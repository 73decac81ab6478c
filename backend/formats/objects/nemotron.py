"""Nemotron before version 3: a list of objects in `<TOOLCALL>`."""

from backend.formats.dialects import JSON_CALLS, Reading
from backend.formats.evidence import in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar
from backend.formats.objects.lists import list_of_calls

OPENER, CLOSER = "<TOOLCALL>", "</TOOLCALL>"

FORMAT = ToolFormat(
    name="nemotron",
    aliases=("nemotron_v2", "nemotron_json"),
    clues=(in_template(OPENER),),
    openers=(OPENER,),
    closers=(CLOSER,),
    readings=(Reading(dialect=JSON_CALLS, end=CLOSER),),
    grammar=CallGrammar(frames=(list_of_calls(OPENER, CLOSER),)),
)
