"""MiniMax M3: a mark before each tag, so that no value looks like a tag.

Arguments are elements named after themselves, and nested values are nested elements.
"""

from backend.formats.dialects import Reading, Tags
from backend.formats.evidence import in_template
from backend.formats.format import ReasoningFormat, ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.tagged import minimax_m2 as m2
from backend.formats.template import ARGUMENTS, KEY, NAME, VALUE

MARK = "]<]minimax[>["
OPENER, CLOSER = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
THINK = "<mm:think>"

TAGS = Tags(
    call=(f"{MARK}{m2.INVOKE}", NAME, '">', ARGUMENTS, f"{MARK}{m2.INVOKE_END}"),
    parameter=(f"{MARK}<", KEY, ">", VALUE, f"{MARK}</", KEY, ">"),
    requires_ends=True,
    mark=MARK,
    # In M2, argument names are attributes.
    misspelling=m2.PARAMETER.removeprefix("<"),
)

FORMAT = ToolFormat(
    name="minimax_m3",
    clues=(in_template(MARK),),
    openers=(OPENER, m2.OPENER),
    closers=(CLOSER, m2.CLOSER),
    tokens=(MARK,),
    readings=(
        Reading(dialect=TAGS, openers=(OPENER,), end=CLOSER),
        Reading(dialect=m2.TAGS, openers=(m2.OPENER,), end=m2.CLOSER),
    ),
    grammar=CallGrammar(
        frames=(
            Frame(
                dialect=TAGS,
                opener=OPENER,
                call=("\n", *TAGS.call),
                end=f"\n{CLOSER}",
            ),
        ),
    ),
)

THOUGHT = ReasoningFormat(
    name="mm_think",
    aliases=("minimax_m3",),
    clues=(in_template(THINK),),
    starts=(THINK,),
    ends=("</mm:think>",),
)
