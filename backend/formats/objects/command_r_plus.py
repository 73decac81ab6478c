"""Command R and R+ up to 08-2024: a list of objects in a fence after `Action:`."""

from backend.formats.dialects import Objects, Reading
from backend.formats.evidence import in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.template import ARGUMENTS, QUOTED_NAME

OPENER = "Action:"
FENCE, FENCE_END = "```json", "```"

CALLS = Objects(
    (
        *('{\n        "tool_name": ', QUOTED_NAME, ',\n        "parameters": '),
        *(ARGUMENTS, "\n    }"),
    )
)

FORMAT = ToolFormat(
    name="command_r_plus",
    aliases=("command_r_08_2024",),
    clues=(in_template(OPENER, "directly-answer"), in_template(OPENER, "directly_answer")),
    openers=(OPENER,),
    readings=(Reading(dialect=CALLS),),
    grammar=CallGrammar(
        frames=(
            Frame(
                dialect=CALLS,
                opener=OPENER,
                begin=(f"\n{FENCE}\n[\n    ",),
                separator=(",\n    ",),
                end=f"\n]{FENCE_END}",
            ),
        ),
    ),
    # The calls themselves are in a fence.
    is_quotable=False,
)
