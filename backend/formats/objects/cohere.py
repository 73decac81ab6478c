"""Command R7B, Command A and later: a list of objects between tokens, with numeric ids."""

from backend.formats.dialects import Objects, Reading
from backend.formats.evidence import as_tokens, in_template
from backend.formats.format import ReasoningFormat, ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.template import ARGUMENTS, INDEX, QUOTED_NAME, Id

OPENER, CLOSER = "<|START_ACTION|>", "<|END_ACTION|>"
THINKING = "<|START_THINKING|>"

CALLS = Objects(
    (
        *('{"tool_call_id": "', Id((INDEX,)), '", "tool_name": ', QUOTED_NAME),
        *(', "parameters": ', ARGUMENTS, "}"),
    )
)

FORMAT = ToolFormat(
    name="cohere",
    aliases=("command_r", "cohere_command3"),
    clues=(in_template(OPENER),),
    openers=(OPENER,),
    closers=(CLOSER,),
    readings=(Reading(dialect=CALLS, end=CLOSER),),
    grammar=CallGrammar(
        frames=(
            Frame(
                dialect=CALLS,
                opener=OPENER,
                begin=("[\n    ",),
                separator=(",\n    ",),
                end=f"\n]{CLOSER}",
            ),
        ),
    ),
)

THOUGHT = ReasoningFormat(
    name="cohere_think",
    aliases=("cohere", "command_r", "cohere_command3"),
    clues=(in_template(THINKING), as_tokens(THINKING)),
    starts=(THINKING,),
    ends=("<|END_THINKING|>",),
    frames=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
