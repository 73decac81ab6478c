"""Formats whose calls are literals: Python calls, and the maps of Gemma."""

from backend.formats.dialects import ARGUMENTS, JSON_CALLS, KEY, NAME, VALUE, Literals, Reading
from backend.formats.format import Frame, ReasoningFormat, ToolFormat, as_tokens, in_template

# Calls of the Gemma family, `call:f{a:<|"|>x<|"|>,n:2}` between markers.

CALL = "call:"


def _gemma(
    name: str,
    openers: tuple[str, ...],
    closers: tuple[str, ...],
    quote: str,
    clue: tuple[str, ...],
    leaks: tuple[str, ...],
) -> ToolFormat:
    """Return the format of one Gemma generation; of the openers only the first is right."""
    calls = _calls(quote)
    opener, closer, *others = (openers[0], *closers)
    return ToolFormat(
        name=name,
        clues=(in_template(*clue),),
        openers=openers,
        leads=(CALL,),
        closers=closers,
        leaks=leaks,
        tokens=(quote,),
        # Fine-tunes sometimes write JSON between the markers.
        readings=(
            Reading(JSON_CALLS, begins=('{"', "["), end=closer, other_ends=tuple(others)),
            Reading(calls, end=closer, other_ends=tuple(others)),
        ),
        frames=(
            Frame(calls, opener, call=(*calls.call, closer), separator=(opener,), is_block=False),
        ),
        is_quotable=False,
    )


def _calls(quote: str) -> Literals:
    return Literals(
        call=(CALL, NAME, "{", ARGUMENTS, "}"),
        argument=(KEY, ":", VALUE),
        comma=",",
        colon=":",
        # Small models fall back to the quotes of JSON and of Python, inside brackets above all.
        quotes=(quote, '"', "'"),
        constants={"true": ("true",), "false": ("false",), "null": ("null",)},
        has_bare_text=True,
        sorts_names=True,
    )


# Gemma 4.

GEMMA4_OPENER, GEMMA4_CLOSER = "<|tool_call>", "<tool_call|>"
GEMMA4_MISSPELLING = "<|tool_call|>"
GEMMA4_RESPONSE = "<|tool_response>"
GEMMA4_CHANNEL, GEMMA4_CHANNEL_END = "<|channel>", "<channel|>"
GEMMA4_THOUGHT_NAME = "thought\n"
GEMMA4_THOUGHT_START, GEMMA4_RESPONSE_START = (
    f"{GEMMA4_CHANNEL}{GEMMA4_THOUGHT_NAME.rstrip()}",
    f"{GEMMA4_CHANNEL}response\n",
)

GEMMA4 = _gemma(
    "gemma4",
    (GEMMA4_OPENER, GEMMA4_MISSPELLING),
    (GEMMA4_CLOSER, GEMMA4_MISSPELLING, "</tool_call>"),
    quote='<|"|>',
    clue=(GEMMA4_OPENER, GEMMA4_CLOSER),
    leaks=(GEMMA4_RESPONSE,),
)

GEMMA4_THOUGHT = ReasoningFormat(
    name="gemma4_channel",
    aliases=("gemma4", "gemma_channel"),
    clues=(as_tokens(GEMMA4_CHANNEL, GEMMA4_CHANNEL_END), in_template(GEMMA4_THOUGHT_START)),
    starts=(GEMMA4_THOUGHT_START,),
    later_starts=(f"{GEMMA4_CHANNEL}{GEMMA4_THOUGHT_NAME}",),
    first_starts=(GEMMA4_THOUGHT_NAME,),
    ends=(
        *(GEMMA4_CHANNEL_END, GEMMA4_RESPONSE_START),
        # Some go back and forth without a thought.
        f"{GEMMA4_CHANNEL_END}{GEMMA4_THOUGHT_NAME}{GEMMA4_CHANNEL_END}",
    ),
    # Models open channels without naming them; fine-tunes have one for the answer.
    frames=(GEMMA4_CHANNEL, *(f"{GEMMA4_CHANNEL}{name}\n" for name in ("content", "final"))),
    tokens=(GEMMA4_CHANNEL,),
)


# FunctionGemma.

FUNCTIONGEMMA_OPENER, FUNCTIONGEMMA_CLOSER = "<start_function_call>", "<end_function_call>"

FUNCTIONGEMMA_RESPONSE = "<start_function_response>"

FUNCTIONGEMMA = _gemma(
    "functiongemma",
    (FUNCTIONGEMMA_OPENER,),
    (FUNCTIONGEMMA_CLOSER,),
    quote="<escape>",
    clue=(FUNCTIONGEMMA_OPENER,),
    leaks=(FUNCTIONGEMMA_RESPONSE,),
)


# LFM2, Llama 4 and prompt-driven models: calls in Python, `[f(a="x", n=2), g()]`.

PYTHONIC_LEAD, PYTHONIC_LEAD_END = "[", "]"
PYTHONIC_JSON, PYTHONIC_ARGUMENTS = "{", "("
PYTHONIC_END = "<|eot|>"
PYTHONIC_OPENER, PYTHONIC_CLOSER = "<|tool_call_start|>", "<|tool_call_end|>"
PYTHONIC_PYTHON, PYTHONIC_PYTHON_END = "<|python_start|>", "<|python_end|>"

PYTHONIC_CALLS = Literals(
    call=(NAME, "(", ARGUMENTS, ")"),
    argument=(KEY, "=", VALUE),
    comma=", ",
    colon=": ",
    quotes=('"""', "'''", '"', "'"),
    constants={"true": ("True", "true"), "false": ("False", "false"), "null": ("None", "null")},
    has_escapes=True,
    has_positions=True,
    before=("functions.", "tools.", "default_api."),
)


def between(opener: str, closer: str, calls: Literals = PYTHONIC_CALLS) -> tuple[Reading, ...]:
    """Return the readings of calls between markers, where some prompts ask for JSON."""
    return (
        Reading(JSON_CALLS, openers=(opener,), begins=("{", "[{"), end=closer),
        Reading(calls, openers=(opener,), end=closer),
    )


PYTHONIC = ToolFormat(
    name="pythonic",
    aliases=("lfm2", "llama4_pythonic", "llama4", "toolace"),
    clues=(
        in_template("<|tool_list_start|>"),
        in_template(PYTHONIC_OPENER),
        in_template("[func_name1("),
        in_template(PYTHONIC_PYTHON),
        as_tokens(PYTHONIC_OPENER, PYTHONIC_CLOSER),
    ),
    openers=(PYTHONIC_OPENER, PYTHONIC_PYTHON),
    leads=(PYTHONIC_LEAD, PYTHONIC_JSON),
    name_lead=PYTHONIC_ARGUMENTS,
    closers=(PYTHONIC_CLOSER, PYTHONIC_PYTHON_END),
    readings=(
        *between(PYTHONIC_OPENER, PYTHONIC_CLOSER),
        *between(PYTHONIC_PYTHON, PYTHONIC_PYTHON_END),
        Reading(PYTHONIC_CALLS, openers=(PYTHONIC_LEAD,)),
        # Only the end of the reply ends lines of calls.
        Reading(PYTHONIC_CALLS, openers=(PYTHONIC_ARGUMENTS,), end=PYTHONIC_END),
        # Llama 4 falls back to objects.
        Reading(JSON_CALLS, openers=(PYTHONIC_LEAD,), begins=(PYTHONIC_JSON,)),
        Reading(JSON_CALLS, openers=(PYTHONIC_JSON,)),
    ),
    frames=(
        Frame(
            PYTHONIC_CALLS,
            PYTHONIC_LEAD,
            separator=(", ",),
            end=PYTHONIC_LEAD_END,
            lacks=PYTHONIC_OPENER,
            is_lead=True,
        ),
        Frame(
            PYTHONIC_CALLS,
            PYTHONIC_OPENER,
            begin=(PYTHONIC_LEAD,),
            separator=(", ",),
            end=f"{PYTHONIC_LEAD_END}{PYTHONIC_CLOSER}",
            needs=PYTHONIC_OPENER,
        ),
    ),
    is_quotable=False,
)


# MiniCPM 3: calls in Python, one per line, in a fence between tokens; a thought comes before them.

_MINICPM3_FENCE, _MINICPM3_FENCE_END = "```python\n", "```\n"
MINICPM3_OPENER, MINICPM3_CLOSER = (
    f"{PYTHONIC_OPENER}\n{_MINICPM3_FENCE}",
    f"{_MINICPM3_FENCE_END}{PYTHONIC_CLOSER}",
)
MINICPM3_THINK, MINICPM3_THINK_END = "<|thought_start|>", "<|thought_end|>"

MINICPM3 = ToolFormat(
    name="minicpm3",
    clues=(in_template(PYTHONIC_OPENER, MINICPM3_THINK),),
    # The fence may be missing.
    openers=(MINICPM3_OPENER, PYTHONIC_OPENER),
    closers=(MINICPM3_CLOSER, PYTHONIC_CLOSER),
    readings=(
        *between(MINICPM3_OPENER, MINICPM3_CLOSER),
        *between(PYTHONIC_OPENER, PYTHONIC_CLOSER),
    ),
    frames=(Frame(PYTHONIC_CALLS, MINICPM3_OPENER, separator=("\n",), end=f"\n{MINICPM3_CLOSER}"),),
    is_quotable=False,
)

MINICPM3_THOUGHT = ReasoningFormat(
    name="minicpm3_thought",
    aliases=("minicpm3",),
    clues=(in_template(MINICPM3_THINK), as_tokens(MINICPM3_THINK, MINICPM3_THINK_END)),
    starts=(MINICPM3_THINK,),
    ends=(MINICPM3_THINK_END,),
)


# OLMo 3: calls in Python, one per line, in `<function_calls>`.

OLMO3_OPENER, OLMO3_CLOSER = "<function_calls>", "</function_calls>"

OLMO3 = ToolFormat(
    name="olmo3",
    clues=(in_template(OLMO3_OPENER),),
    openers=(OLMO3_OPENER,),
    closers=(OLMO3_CLOSER,),
    readings=between(OLMO3_OPENER, OLMO3_CLOSER),
    frames=(
        Frame(
            PYTHONIC_CALLS, OLMO3_OPENER, begin=("\n",), separator=("\n",), end=f"\n{OLMO3_CLOSER}"
        ),
        Frame(PYTHONIC_CALLS, OLMO3_OPENER, separator=("\n",), end=OLMO3_CLOSER),
    ),
)
