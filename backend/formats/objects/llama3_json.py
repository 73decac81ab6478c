"""Llama 3: a bare object, an object after a token, or a name in a tag and JSON after it."""

from backend.formats.dialects import Reading, json_object
from backend.formats.evidence import in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.named import tagged_json

OPENER = "<|python_tag|>"

CALLS = json_object("name", "parameters")

FORMAT = ToolFormat(
    name="llama3_json",
    aliases=("llama3", "llama4_json"),
    clues=(in_template(OPENER),),
    openers=(OPENER, tagged_json.OPENER),
    leads=("{",),
    closers=(tagged_json.CLOSER,),
    readings=(
        Reading(dialect=tagged_json.CALLS, openers=(tagged_json.OPENER,)),
        Reading(dialect=CALLS, openers=(OPENER, "{")),
    ),
    grammar=CallGrammar(
        frames=(
            Frame(dialect=CALLS, opener='{"name": ', separator=("; ",), is_lead=True),
            Frame(dialect=CALLS, opener=OPENER, separator=("; ",), needs=OPENER),
        ),
    ),
)
