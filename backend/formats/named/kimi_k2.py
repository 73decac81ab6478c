"""Kimi K2: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}`.

Later turns refer to the id written by the model, so it is kept.
"""

from backend.formats.dialects import NamedJson, Reading
from backend.formats.evidence import in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.template import ARGUMENTS, INDEX, NAME, Id

OPENER, CLOSER = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
# Some models write the section markers in the singular.
ONE_OPENER, ONE_CLOSER = "<|tool_call_section_begin|>", "<|tool_call_section_end|>"
BEGIN, ARGUMENTS_BEGIN = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
END = "<|tool_call_end|>"

CALLS = NamedJson(
    calls=((BEGIN, Id(("functions.", NAME, ":", INDEX)), ARGUMENTS_BEGIN, ARGUMENTS, END),)
)

FORMAT = ToolFormat(
    name="kimi_k2",
    clues=(in_template(OPENER),),
    # The section around the calls may be missing.
    openers=(OPENER, ONE_OPENER, BEGIN),
    closers=(CLOSER, ONE_CLOSER, END),
    tokens=(ARGUMENTS_BEGIN,),
    readings=(Reading(dialect=CALLS, end=CLOSER, other_ends=(ONE_CLOSER,)),),
    grammar=CallGrammar(frames=(Frame(dialect=CALLS, opener=OPENER, end=CLOSER),)),
)
