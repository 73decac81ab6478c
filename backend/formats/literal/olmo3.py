"""OLMo 3: calls in Python, one per line, in `<function_calls>`."""

from backend.formats.evidence import in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.literal.pythonic import CALLS, between

OPENER, CLOSER = "<function_calls>", "</function_calls>"

FORMAT = ToolFormat(
    name="olmo3",
    clues=(in_template(OPENER),),
    openers=(OPENER,),
    closers=(CLOSER,),
    readings=between(OPENER, CLOSER),
    grammar=CallGrammar(
        frames=(
            Frame(
                dialect=CALLS,
                opener=OPENER,
                begin=("\n",),
                separator=("\n",),
                end=f"\n{CLOSER}",
            ),
        ),
    ),
)
