"""Step 3: tags of StepTML between markers in fullwidth bars."""

from backend.formats.dialects import Reading, Tags
from backend.formats.evidence import Clue
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.template import ARGUMENTS, KEY, NAME, VALUE

OPENER, CLOSER = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
BEGIN, SEPARATOR, END = "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"

TAGS = Tags(
    call=(
        *(f'{BEGIN}function{SEPARATOR}<steptml:invoke name="', NAME, '">'),
        *(ARGUMENTS, f"</steptml:invoke>{END}"),
    ),
    parameter=('<steptml:parameter name="', KEY, '">', VALUE, "</steptml:parameter>"),
)

FORMAT = ToolFormat(
    name="step3",
    clues=(Clue(anywhere=(OPENER,)),),
    openers=(OPENER,),
    closers=(CLOSER,),
    tokens=(BEGIN, SEPARATOR, END),
    readings=(Reading(dialect=TAGS, end=CLOSER),),
    grammar=CallGrammar(frames=(Frame(dialect=TAGS, opener=OPENER, end=CLOSER),)),
)
