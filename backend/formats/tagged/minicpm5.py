"""MiniCPM 5: `<function name="f"><param name="a">…</param></function>`.

A value that contains markup is a CDATA section.
"""

from backend.formats.dialects import Reading, Tags
from backend.formats.evidence import in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.template import ARGUMENTS, KEY, NAME, VALUE

OPENER, CLOSER = "<function name=", "</function>"
PARAMETER = "<param name="

TAGS = Tags(
    call=(f'{OPENER}"', NAME, '">', ARGUMENTS, CLOSER),
    parameter=(f'{PARAMETER}"', KEY, '">', VALUE, "</param>"),
    verbatim=("<![CDATA[", "]]>"),
    special="<&",
)

FORMAT = ToolFormat(
    name="minicpm5",
    clues=(in_template(f'{OPENER}"', f'{PARAMETER}"'),),
    openers=(OPENER,),
    closers=(CLOSER,),
    readings=(Reading(dialect=TAGS),),
    grammar=CallGrammar(
        frames=(Frame(dialect=TAGS, opener=OPENER, separator=("\n",), is_block=False),),
    ),
)
