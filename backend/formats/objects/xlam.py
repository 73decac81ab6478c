"""xLAM 2: a bare list of objects as the whole reply."""

from backend.formats.dialects import JSON_CALLS, Reading
from backend.formats.evidence import in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame

LEAD, LEAD_END = "[", "]"

FORMAT = ToolFormat(
    name="xlam",
    clues=(in_template("single JSON array"),),
    leads=(LEAD, "{"),
    readings=(Reading(dialect=JSON_CALLS),),
    grammar=CallGrammar(
        frames=(
            Frame(dialect=JSON_CALLS, opener=LEAD, separator=(", ",), end=LEAD_END, is_lead=True),
        ),
    ),
)
