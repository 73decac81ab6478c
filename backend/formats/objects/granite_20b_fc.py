"""Granite 20B Functioncalling: objects, each after a tag."""

from backend.formats.dialects import JSON_CALLS, Reading
from backend.formats.evidence import in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame

OPENER = "<function_call>"

FORMAT = ToolFormat(
    name="granite_20b_fc",
    clues=(in_template(OPENER),),
    openers=(OPENER,),
    readings=(Reading(dialect=JSON_CALLS),),
    grammar=CallGrammar(
        frames=(
            Frame(
                dialect=JSON_CALLS,
                opener=OPENER,
                call=(" ", *JSON_CALLS.call),
                separator=(f"\n{OPENER}",),
                is_block=False,
            ),
        ),
    ),
)
