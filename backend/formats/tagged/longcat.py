"""LongCat: pairs with its own tags, or JSON, depending on the checkpoint."""

from backend.formats.dialects import JSON_CALLS, Reading
from backend.formats.evidence import as_tokens, in_template
from backend.formats.format import ReasoningFormat, ToolFormat
from backend.formats.grammar import CallGrammar, Frame, calls_between
from backend.formats.tagged.pairs import pair_tags, pairs
from backend.formats.template import NAME

PREFIX = "longcat_"
OPENER, CLOSER = f"<{PREFIX}tool_call>", f"</{PREFIX}tool_call>"
THINK = f"<{PREFIX}think>"

TAGS = pairs((OPENER, NAME, "\n"), CLOSER, PREFIX)
KEY_TAG = pair_tags(TAGS)[0]

FORMAT = ToolFormat(
    name="longcat",
    clues=(in_template(OPENER),),
    openers=(OPENER,),
    closers=(CLOSER,),
    tokens=pair_tags(TAGS),
    readings=(
        Reading(dialect=JSON_CALLS, begins=("{", "["), end=CLOSER),
        Reading(dialect=TAGS),
    ),
    grammar=CallGrammar(
        frames=(
            Frame(dialect=TAGS, opener=OPENER, separator=("\n",), needs=KEY_TAG, is_block=False),
            calls_between(OPENER, CLOSER, JSON_CALLS, lacks=KEY_TAG),
        ),
    ),
)

THOUGHT = ReasoningFormat(
    name="longcat_think",
    aliases=("longcat",),
    clues=(in_template(THINK), as_tokens(THINK)),
    starts=(THINK,),
    ends=(f"</{PREFIX}think>",),
)
