"""MiniMax M2: `<invoke name="f"><parameter name="a">…</parameter></invoke>`."""

from backend.formats.dialects import Reading, Tags
from backend.formats.evidence import in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.template import ARGUMENTS, KEY, NAME, VALUE

OPENER, CLOSER = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, INVOKE_END = '<invoke name="', "</invoke>"
PARAMETER = '<parameter name="'

TAGS = Tags(
    call=(INVOKE, NAME, '">\n', ARGUMENTS, INVOKE_END),
    parameter=(PARAMETER, KEY, '">', VALUE, "</parameter>\n"),
)

FORMAT = ToolFormat(
    name="minimax_m2",
    aliases=("minimax",),
    clues=(in_template(OPENER),),
    openers=(OPENER,),
    closers=(CLOSER,),
    readings=(Reading(dialect=TAGS, end=CLOSER),),
    grammar=CallGrammar(
        frames=(Frame(dialect=TAGS, opener=OPENER, call=("\n", *TAGS.call), end=f"\n{CLOSER}"),),
    ),
)
