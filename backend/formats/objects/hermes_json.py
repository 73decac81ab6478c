"""Hermes, Qwen 2.5 and 3, and many more: one object per call, each in its own tags."""

from backend.formats.dialects import JSON_CALLS, Reading
from backend.formats.evidence import in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, calls_between
from backend.formats.tagged import qwen3_coder_xml as xml

OPENER, CLOSER = xml.OPENER, xml.CLOSER

FORMAT = ToolFormat(
    name="hermes_json",
    aliases=(
        *("hermes", "json_tools", "qwen", "qwen25", "qwen3", "granite4", "exaone4", "ernie45"),
    ),
    clues=(
        in_template(OPENER, "tool_call.name"),
        in_template(OPENER, '"arguments"'),
    ),
    openers=(OPENER,),
    closers=(CLOSER,),
    # Models trained on both formats sometimes write tags between the markers.
    readings=(
        Reading(dialect=xml.TAGS, begins=(xml.FUNCTION,), end=CLOSER),
        Reading(dialect=JSON_CALLS, end=CLOSER),
    ),
    grammar=CallGrammar(
        frames=(calls_between(OPENER, CLOSER, JSON_CALLS),),
    ),
)
