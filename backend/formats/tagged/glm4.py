"""GLM: a name and pairs, with newlines between the tags (4.5, 4.6) or without (4.7 and later)."""

from backend.formats.dialects import JSON_CALLS, Reading
from backend.formats.evidence import in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.tagged.pairs import pair_tags, pairs
from backend.formats.template import MAYBE_LINE, NAME

OPENER, CLOSER = "<tool_call>", "</tool_call>"

TAGS = pairs((OPENER, NAME, MAYBE_LINE), CLOSER)

FORMAT = ToolFormat(
    name="glm4",
    aliases=("glm", "glm45", "glm47", "glm4_moe", "glm47_moe", "poolside_v1"),
    clues=(in_template(pair_tags(TAGS)[0]),),
    openers=(OPENER,),
    closers=(CLOSER,),
    tokens=pair_tags(TAGS),
    # Small models sometimes write JSON between the markers.
    readings=(
        Reading(dialect=JSON_CALLS, begins=("{", "["), end=CLOSER),
        Reading(dialect=TAGS),
    ),
    grammar=CallGrammar(
        frames=(Frame(dialect=TAGS, opener=OPENER, separator=(MAYBE_LINE,), is_block=False),),
    ),
)
