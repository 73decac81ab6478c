"""HyperCLOVA X SEED Think: a list of objects in a turn whose role names it.

A thought is a turn too: the prompt ends with `assistant/think`, and the answer's own turn follows.
"""

from backend.formats.dialects import JSON_CALLS, Reading
from backend.formats.evidence import in_template
from backend.formats.format import ReasoningFormat, ToolFormat
from backend.formats.grammar import CallGrammar
from backend.formats.objects.lists import list_of_calls

OPENER = " -> tool/function_call\n"
TURN, TURN_END = "<|im_start|>", "<|im_end|>"
NEXT = f"{TURN_END}\n{TURN}assistant"
THINK = "/think\n"

FORMAT = ToolFormat(
    name="hyperclovax",
    aliases=("hyperclovax_seed_think", "hyperclovax_seed_think_14b"),
    clues=(in_template(OPENER.strip()),),
    openers=(OPENER,),
    tokens=(TURN,),
    readings=(Reading(dialect=JSON_CALLS),),
    grammar=CallGrammar(frames=(list_of_calls(OPENER),)),
)

THOUGHT = ReasoningFormat(
    name="hyperclovax_think",
    aliases=("hyperclovax", "hyperclovax_seed_think", "hyperclovax_seed_think_14b"),
    clues=(in_template("assistant/think"),),
    starts=(THINK,),
    ends=(NEXT,),
    frames=(TURN_END, "<|stop|>"),
    tokens=(TURN,),
)
