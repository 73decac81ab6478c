"""LFM2, Llama 4 and prompt-driven models: calls in Python, `[f(a="x", n=2), g()]`."""

from backend.formats.dialects import JSON_CALLS, Literals, Reading
from backend.formats.evidence import as_tokens, in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.template import ARGUMENTS, KEY, NAME, VALUE

LEAD, LEAD_END = "[", "]"
OPENER, CLOSER = "<|tool_call_start|>", "<|tool_call_end|>"
PYTHON, PYTHON_END = "<|python_start|>", "<|python_end|>"

CALLS = Literals(
    call=(NAME, "(", ARGUMENTS, ")"),
    argument=(KEY, "=", VALUE),
    comma=", ",
    colon=": ",
    quotes=('"""', "'''", '"', "'"),
    constants={"true": ("True", "true"), "false": ("False", "false"), "null": ("None", "null")},
    has_escapes=True,
    has_positions=True,
)


def between(opener: str, closer: str) -> tuple[Reading, ...]:
    """Return the readings of calls between markers, where some prompts ask for JSON."""
    return (
        Reading(dialect=JSON_CALLS, openers=(opener,), begins=("{", "[{"), end=closer),
        Reading(dialect=CALLS, openers=(opener,), end=closer),
    )


FORMAT = ToolFormat(
    name="pythonic",
    aliases=("lfm2", "llama4_pythonic", "llama4", "toolace"),
    clues=(
        in_template("<|tool_list_start|>"),
        in_template(OPENER),
        in_template("[func_name1(params_name1="),
        as_tokens(OPENER, CLOSER),
    ),
    openers=(OPENER, PYTHON),
    leads=(LEAD,),
    closers=(CLOSER, PYTHON_END),
    readings=(
        *between(OPENER, CLOSER),
        *between(PYTHON, PYTHON_END),
        Reading(dialect=CALLS, openers=(LEAD,)),
    ),
    grammar=CallGrammar(
        frames=(
            Frame(
                dialect=CALLS,
                opener=LEAD,
                separator=(", ",),
                end=LEAD_END,
                lacks=OPENER,
                is_lead=True,
            ),
            Frame(
                dialect=CALLS,
                opener=OPENER,
                begin=(LEAD,),
                separator=(", ",),
                end=f"{LEAD_END}{CLOSER}",
                needs=OPENER,
            ),
        ),
    ),
    is_quotable=False,
)
