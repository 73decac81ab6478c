"""Qwen3-Coder, Nemotron 3, Step 3.5, MiMo: `<function=f><parameter=a>…</parameter></function>`."""

from backend.formats.dialects import JSON_CALLS, Reading, Tags
from backend.formats.evidence import in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame, calls_between
from backend.formats.template import ARGUMENTS, KEY, NAME, VALUE

OPENER, CLOSER = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

TAGS = Tags(
    call=(FUNCTION, NAME, ">\n", ARGUMENTS, FUNCTION_END),
    parameter=(PARAMETER, KEY, ">\n", VALUE, f"\n{PARAMETER_END}\n"),
)

FORMAT = ToolFormat(
    name="qwen3_coder_xml",
    aliases=("qwen3_coder", "qwen3_xml", "nemotron_v3", "nemotron_3", "step3p5", "mimo"),
    clues=(
        in_template(f"{OPENER}\n{FUNCTION}"),
        # Most templates contain the newline as an escape inside a string.
        in_template(rf"{OPENER}\n{FUNCTION}"),
    ),
    openers=(OPENER, FUNCTION),
    closers=(CLOSER,),
    # Small models sometimes write JSON between the markers.
    readings=(
        Reading(dialect=JSON_CALLS, begins=("{", "["), end=CLOSER),
        Reading(dialect=TAGS, end=CLOSER),
    ),
    grammar=CallGrammar(
        frames=(
            calls_between(OPENER, CLOSER, TAGS),
            Frame(dialect=TAGS, opener=FUNCTION, separator=("\n",), is_block=False, is_lapse=True),
        ),
    ),
)
