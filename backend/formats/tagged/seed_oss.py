"""Seed-OSS: Qwen3-Coder's tags in its own block, without newlines around values."""

from backend.formats.dialects import Reading, Tags
from backend.formats.evidence import as_tokens, in_template
from backend.formats.format import ReasoningFormat, ToolFormat
from backend.formats.grammar import CallGrammar, calls_between
from backend.formats.tagged.qwen3_coder_xml import PARAMETER, PARAMETER_END
from backend.formats.tagged.qwen3_coder_xml import TAGS as QWEN_TAGS
from backend.formats.template import KEY, VALUE

OPENER, CLOSER = "<seed:tool_call>", "</seed:tool_call>"
THINK = "<seed:think>"
_REFLECTION, _REFLECTION_END = "<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>"

TAGS = Tags(
    call=QWEN_TAGS.call,
    parameter=(PARAMETER, KEY, ">", VALUE, f"{PARAMETER_END}\n"),
)

FORMAT = ToolFormat(
    name="seed_oss",
    clues=(in_template(OPENER),),
    openers=(OPENER,),
    closers=(CLOSER,),
    readings=(Reading(dialect=TAGS, end=CLOSER),),
    grammar=CallGrammar(
        frames=(calls_between(OPENER, CLOSER, TAGS),),
    ),
)

THOUGHT = ReasoningFormat(
    name="seed_think",
    aliases=("seed_oss",),
    clues=(in_template(THINK), as_tokens(THINK)),
    starts=(THINK,),
    ends=("</seed:think>",),
    notes=(_REFLECTION, _REFLECTION_END),
    parting=(
        f"\n{_REFLECTION}I have exhausted my token budget, and now I will start answering the "
        f"question.{_REFLECTION_END}\n"
    ),
)
