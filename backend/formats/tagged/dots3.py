"""Dots3 Note: `<invoke name="f"><parameter name="a">…</parameter></invoke>` on one line."""

from backend.formats.dialects import JSON_CALLS, Reading, Tags
from backend.formats.evidence import as_tokens, in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.tagged.minimax_m2 import INVOKE, INVOKE_END, PARAMETER
from backend.formats.template import ARGUMENTS, KEY, NAME, VALUE

OPENER, CLOSER = "<dots_function_call>", "</dots_function_call>"

TAGS = Tags(
    call=(INVOKE, NAME, '">', ARGUMENTS, INVOKE_END),
    parameter=(PARAMETER, KEY, '">', VALUE, "</parameter>"),
)

FORMAT = ToolFormat(
    name="dots3",
    aliases=("dots", "dots_note"),
    clues=(in_template(OPENER), as_tokens(OPENER)),
    openers=(OPENER,),
    closers=(CLOSER,),
    # Served models also write JSON between the markers.
    readings=(
        Reading(dialect=JSON_CALLS, begins=("{", "["), end=CLOSER),
        Reading(dialect=TAGS, end=CLOSER),
    ),
    grammar=CallGrammar(frames=(Frame(dialect=TAGS, opener=OPENER, call=TAGS.call, end=CLOSER),)),
)
