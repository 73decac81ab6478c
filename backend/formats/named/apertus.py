"""Apertus: a list of objects keyed by the name of the tool, `[{"f": {…}}]`."""

from backend.formats.dialects import NamedJson, Reading
from backend.formats.evidence import as_tokens, in_template
from backend.formats.format import ReasoningFormat, ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.template import ARGUMENTS, QUOTED_NAME

OPENER, CLOSER = "<|tools_prefix|>", "<|tools_suffix|>"
THOUGHT_START, THOUGHT_END = "<|inner_prefix|>", "<|inner_suffix|>"

CALLS = NamedJson(calls=(("{", QUOTED_NAME, ": ", ARGUMENTS, "}"),), is_list=True)

FORMAT = ToolFormat(
    name="apertus",
    clues=(in_template(OPENER),),
    openers=(OPENER,),
    closers=(CLOSER,),
    readings=(Reading(dialect=CALLS, end=CLOSER),),
    grammar=CallGrammar(
        frames=(
            Frame(dialect=CALLS, opener=OPENER, begin=("[",), separator=(", ",), end=f"]{CLOSER}"),
        ),
    ),
    # The inner part of a reply also contains its calls.
    has_drafts=False,
)

THOUGHT = ReasoningFormat(
    name="apertus_inner",
    aliases=("apertus",),
    clues=(as_tokens(THOUGHT_START, THOUGHT_END),),
    starts=(THOUGHT_START,),
    ends=(THOUGHT_END,),
)
