"""Sarashina 2.2: a list of objects after a token, or bare; written as Python literals."""

from backend.formats.dialects import JSON_CALLS, Reading
from backend.formats.evidence import Clue
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar
from backend.formats.objects.lists import list_of_calls

OPENER = "<|tool_calls|>"

FORMAT = ToolFormat(
    name="sarashina",
    aliases=("sarashina2",),
    clues=(Clue(anywhere=(OPENER,)),),
    openers=(OPENER,),
    leads=("[",),
    readings=(Reading(dialect=JSON_CALLS),),
    grammar=CallGrammar(frames=(list_of_calls(OPENER),)),
)
