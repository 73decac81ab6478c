"""iQuest Coder V2: pairs as in GLM, between markers of its own."""

from backend.formats.dialects import JSON_CALLS, Reading
from backend.formats.evidence import as_tokens, in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.tagged.pairs import pair_tags, pairs
from backend.formats.template import MAYBE_LINE, NAME

OPENER, CLOSER = "<iquestcoder_tool_call>", "</iquestcoder_tool_call>"

TAGS = pairs((OPENER, NAME, MAYBE_LINE), CLOSER)

FORMAT = ToolFormat(
    name="iquest_coder",
    aliases=("iquest_coder_v2", "iquest_q1"),
    clues=(in_template(OPENER), as_tokens(OPENER)),
    openers=(OPENER,),
    closers=(CLOSER,),
    tokens=pair_tags(TAGS),
    readings=(
        Reading(dialect=JSON_CALLS, begins=("{", "["), end=CLOSER),
        Reading(dialect=TAGS),
    ),
    grammar=CallGrammar(
        frames=(Frame(dialect=TAGS, opener=OPENER, separator=(MAYBE_LINE,), is_block=False),),
    ),
)
