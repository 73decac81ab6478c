"""Formats whose calls are JSON objects, one each or in a list."""

from dataclasses import replace

from backend.formats import named, tagged
from backend.formats.dialects import (
    ARGUMENTS,
    INDEX,
    JSON_CALLS,
    MAYBE_LINE,
    NAME,
    QUOTED_NAME,
    Citations,
    Id,
    NamedJson,
    Objects,
    Reading,
    json_object,
)
from backend.formats.format import (
    Clue,
    Frame,
    ReasoningFormat,
    Section,
    ToolFormat,
    as_tokens,
    block_between,
    calls_between,
    calls_inside,
    in_template,
)
from backend.formats.literal import (
    OLMO3_CLOSER,
    OLMO3_OPENER,
    PYTHONIC_CALLS,
    PYTHONIC_PYTHON,
    PYTHONIC_PYTHON_END,
    between,
)

# A list of calls as JSON objects.


def _list_of_calls(opener: str, closer: str = "") -> Frame:
    """Return the frame of a list between two markers."""
    return Frame(JSON_CALLS, opener, begin=("[",), separator=(", ",), end=f"]{closer}")


# Command R7B, Command A and later: a list of objects between tokens, with numeric ids.

COHERE_OPENER, COHERE_CLOSER = "<|START_ACTION|>", "<|END_ACTION|>"
COHERE_THINKING = "<|START_THINKING|>"
COHERE_CITATIONS = Citations("<co", "</co")

COHERE_CALLS = Objects(
    (
        *('{"tool_call_id": "', Id((INDEX,)), '", "tool_name": ', QUOTED_NAME),
        *(', "parameters": ', ARGUMENTS, "}"),
    )
)

COHERE = ToolFormat(
    name="cohere",
    aliases=("command_r", "cohere_command3", "cohere_command4"),
    clues=(in_template(COHERE_OPENER),),
    openers=(COHERE_OPENER,),
    closers=(COHERE_CLOSER,),
    citations=COHERE_CITATIONS,
    readings=(Reading(COHERE_CALLS, end=COHERE_CLOSER),),
    frames=(
        Frame(
            COHERE_CALLS,
            COHERE_OPENER,
            begin=("[\n    ",),
            separator=(",\n    ",),
            end=f"\n]{COHERE_CLOSER}",
        ),
    ),
)

COHERE_THOUGHT = ReasoningFormat(
    name="cohere_think",
    aliases=("cohere", "command_r", "cohere_command3", "cohere_command4"),
    clues=(in_template(COHERE_THINKING), as_tokens(COHERE_THINKING)),
    starts=(COHERE_THINKING,),
    ends=("<|END_THINKING|>",),
    citations=COHERE_CITATIONS,
    frames=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)


# Command R and R+ up to 08-2024: a list of objects in a fence after `Action:`.

COMMAND_R_PLUS_OPENER = "Action:"
COMMAND_R_PLUS_FENCE, COMMAND_R_PLUS_FENCE_END = "```json", "```"

COMMAND_R_PLUS_CALLS = Objects(
    (
        *('{\n        "tool_name": ', QUOTED_NAME, ',\n        "parameters": '),
        *(ARGUMENTS, "\n    }"),
    )
)

COMMAND_R_PLUS = ToolFormat(
    name="command_r_plus",
    aliases=("command_r_08_2024",),
    clues=(
        in_template(COMMAND_R_PLUS_OPENER, "directly-answer"),
        in_template(COMMAND_R_PLUS_OPENER, "directly_answer"),
    ),
    openers=(COMMAND_R_PLUS_OPENER,),
    citations=COHERE_CITATIONS,
    readings=(Reading(COMMAND_R_PLUS_CALLS),),
    frames=(
        Frame(
            COMMAND_R_PLUS_CALLS,
            COMMAND_R_PLUS_OPENER,
            begin=(f"\n{COMMAND_R_PLUS_FENCE}\n[\n    ",),
            separator=(",\n    ",),
            end=f"\n]{COMMAND_R_PLUS_FENCE_END}",
        ),
    ),
    # The calls themselves are in a fence.
    is_quotable=False,
)


# GigaChat 3 and 3.1: one object after a dedicated role or a token.

GIGACHAT3_MARKER = "<|function_call|>"
GIGACHAT3_SEPARATOR, GIGACHAT3_ROLE_END = "<|message_sep|>", "<|role_sep|>"
GIGACHAT3_ROLE = f"function call{GIGACHAT3_ROLE_END}"

GIGACHAT3 = ToolFormat(
    name="gigachat3",
    aliases=("gigachat", "gigachat31"),
    clues=(in_template(GIGACHAT3_ROLE), in_template(GIGACHAT3_MARKER)),
    openers=(GIGACHAT3_MARKER, f"{GIGACHAT3_SEPARATOR}\n\n{GIGACHAT3_ROLE}", GIGACHAT3_ROLE),
    tokens=(GIGACHAT3_SEPARATOR, GIGACHAT3_ROLE_END),
    leaks=(GIGACHAT3_SEPARATOR,),
    readings=(Reading(JSON_CALLS),),
    frames=(
        Frame(JSON_CALLS, GIGACHAT3_MARKER, needs=GIGACHAT3_MARKER),
        Frame(JSON_CALLS, GIGACHAT3_ROLE, begin=("\n",), lacks=GIGACHAT3_MARKER),
    ),
    most_calls=1,
)


# RWKV 7: an object in a fence, with a heading of its own before each.

RWKV_OPENER, RWKV_FENCE, RWKV_FENCE_END = "**Tool Call:**", "```json", "```"

RWKV = ToolFormat(
    name="rwkv",
    aliases=("rwkv7",),
    clues=(in_template(RWKV_OPENER),),
    openers=(RWKV_OPENER,),
    readings=(Reading(JSON_CALLS),),
    frames=(
        Frame(
            JSON_CALLS,
            RWKV_OPENER,
            call=(f"\n{RWKV_FENCE}\n", *JSON_CALLS.call, f"\n{RWKV_FENCE_END}"),
            separator=(f"\n{RWKV_OPENER}",),
            is_block=False,
        ),
    ),
    # The calls themselves are in a fence.
    is_quotable=False,
)


# Granite 3: a list of objects after a token or bare, or bare lines of calls in Python.

GRANITE_OPENER, GRANITE_END = "<|tool_call|>", "<|end_of_text|>"
GRANITE_PYTHON = "("

GRANITE = ToolFormat(
    name="granite",
    aliases=("granite3", "granite_pythonic"),
    clues=(in_template(GRANITE_OPENER, "<|start_of_role|>"),),
    openers=(GRANITE_OPENER, "<tool_call>", "<function_call>"),
    leads=("[", "{"),
    name_lead=GRANITE_PYTHON,
    closers=(tagged.QWEN3_CODER_CLOSER,),
    leaks=("</function_call>",),
    readings=(
        # Only the end of the reply ends the lines.
        Reading(PYTHONIC_CALLS, openers=(GRANITE_PYTHON,), end=GRANITE_END),
        Reading(JSON_CALLS),
    ),
    frames=(_list_of_calls(GRANITE_OPENER),),
)


# Granite 20B Functioncalling: objects, each after a tag.

GRANITE_20B_FC_OPENER, GRANITE_20B_FC_CLOSER = "<function_call>", "</function_call>"

GRANITE_20B_FC = ToolFormat(
    name="granite_20b_fc",
    clues=(in_template(GRANITE_20B_FC_OPENER),),
    openers=(GRANITE_20B_FC_OPENER,),
    leaks=(GRANITE_20B_FC_CLOSER,),
    readings=(Reading(JSON_CALLS),),
    frames=(
        Frame(
            JSON_CALLS,
            GRANITE_20B_FC_OPENER,
            call=(" ", *JSON_CALLS.call),
            separator=(f"\n{GRANITE_20B_FC_OPENER}",),
            is_block=False,
        ),
    ),
)


# Hermes, Qwen 2.5 and 3, and many more: one object per call, each in its own tags.
#
# Gemma 3, whose templates know no tools, falls back to Python in a fence of its own.

HERMES_OPENER, HERMES_CLOSER = tagged.QWEN3_CODER_OPENER, tagged.QWEN3_CODER_CLOSER
# The tags of the prompt around the tools, in which Qwen 2.5 Coder writes calls, too.
HERMES_TOOLS_OPENER, HERMES_TOOLS_CLOSER = "<tools>", "</tools>"
TOOL_CODE_FENCE, TOOL_CODE_FENCE_END = "```tool_code\n", "```"

TOOL_CODE_CALLS = replace(
    PYTHONIC_CALLS, before=("print(", "await ", *PYTHONIC_CALLS.before), is_script=True
)

HERMES = ToolFormat(
    name="hermes_json",
    aliases=(
        *("hermes", "json_tools", "qwen", "qwen25", "qwen3", "granite4", "exaone4", "ernie45"),
        "trinity",
    ),
    # Templates quote the key in every way, or not at all.
    clues=(in_template(HERMES_OPENER, "tool_call.name"), in_template(HERMES_OPENER, "arguments")),
    openers=(HERMES_OPENER, TOOL_CODE_FENCE),
    closers=(HERMES_CLOSER,),
    # Models trained on both formats sometimes write tags between the markers.
    readings=(
        Reading(
            tagged.QWEN3_CODER_TAGS,
            openers=(HERMES_OPENER,),
            begins=(tagged.QWEN3_CODER_FUNCTION,),
            end=HERMES_CLOSER,
        ),
        Reading(JSON_CALLS, openers=(HERMES_OPENER,), end=HERMES_CLOSER),
        *between(TOOL_CODE_FENCE, TOOL_CODE_FENCE_END, TOOL_CODE_CALLS),
    ),
    lapses=(Reading(JSON_CALLS, openers=(HERMES_TOOLS_OPENER,), end=HERMES_TOOLS_CLOSER),),
    frames=(
        calls_between(HERMES_OPENER, HERMES_CLOSER, JSON_CALLS),
        # As EXAONE 4 writes them.
        calls_inside(HERMES_OPENER, HERMES_CLOSER, JSON_CALLS),
    ),
)


# HyperCLOVA X SEED Think: a list of objects in a turn whose role names it.
#
# A thought is a turn too: the prompt ends with `assistant/think`, and the answer has its own turn.

HYPERCLOVAX_OPENER = " -> tool/function_call\n"
HYPERCLOVAX_TURN, HYPERCLOVAX_TURN_END = "<|im_start|>", "<|im_end|>"
HYPERCLOVAX_NEXT = f"{HYPERCLOVAX_TURN_END}\n{HYPERCLOVAX_TURN}assistant"
HYPERCLOVAX_THINK = "/think\n"

HYPERCLOVAX = ToolFormat(
    name="hyperclovax",
    aliases=("hyperclovax_seed_think_14b",),
    clues=(in_template(HYPERCLOVAX_OPENER.strip()),),
    # The line break may be missing.
    openers=(HYPERCLOVAX_OPENER, HYPERCLOVAX_OPENER.rstrip()),
    tokens=(HYPERCLOVAX_TURN,),
    readings=(Reading(JSON_CALLS),),
    frames=(_list_of_calls(HYPERCLOVAX_OPENER),),
)

HYPERCLOVAX_THOUGHT = ReasoningFormat(
    name="hyperclovax_think",
    aliases=("hyperclovax", "hyperclovax_seed_think_14b"),
    clues=(in_template("assistant/think"),),
    starts=(HYPERCLOVAX_THINK,),
    ends=(HYPERCLOVAX_NEXT,),
    frames=(HYPERCLOVAX_TURN_END, "<|stop|>"),
    tokens=(HYPERCLOVAX_TURN,),
)


# Inkling: typed blocks, `<|content_invoke_tool_json|>{"name":…,"args":{…}}`.
#
# Before the type stands the author of a block: that of a call is its tool.

INKLING_MESSAGE, INKLING_END, INKLING_LAST_END = (
    "<|message_model|>",
    "<|end_message|>",
    "<|content_model_end_sampling|>",
)
INKLING_OPENER = "<|content_invoke_tool_json|>"
INKLING_THINKING, INKLING_TEXT = "<|content_thinking|>", "<|content_text|>"
# Of texts that are no answers.
_INKLING_OTHERS = ("<|content_invoke_tool_text|>", "<|content_tool_error|>")

INKLING_CALLS = Objects(('{"name": ', QUOTED_NAME, ', "args": ', ARGUMENTS, "}"))
_INKLING_CLUE = as_tokens(INKLING_OPENER, INKLING_MESSAGE)

INKLING = ToolFormat(
    name="inkling",
    clues=(_INKLING_CLUE,),
    openers=(INKLING_OPENER,),
    name_lead=INKLING_OPENER,
    tokens=(INKLING_MESSAGE, INKLING_END),
    leaks=(INKLING_MESSAGE, INKLING_END, INKLING_LAST_END),
    readings=(Reading(INKLING_CALLS, end=INKLING_END),),
    frames=(
        Frame(
            INKLING_CALLS,
            INKLING_OPENER,
            separator=(f"{INKLING_END}{INKLING_MESSAGE}{INKLING_OPENER}",),
            end=INKLING_END,
        ),
    ),
    around=Section(begin=INKLING_TEXT, end=f"{INKLING_END}{INKLING_MESSAGE}", may_be_open=True),
    # The same text ends thoughts and calls.
    has_drafts=False,
)

INKLING_THOUGHT = ReasoningFormat(
    name="inkling_thinking",
    aliases=("inkling",),
    clues=(_INKLING_CLUE,),
    starts=(INKLING_THINKING,),
    ends=(INKLING_END,),
    frames=(INKLING_MESSAGE, INKLING_TEXT, INKLING_LAST_END, *_INKLING_OTHERS),
    bridge=INKLING_MESSAGE,
    answer=INKLING_TEXT,
)


# InternLM 2 and 2.5: one object in a plugin action.

INTERNLM2_START, INTERNLM2_PLUGIN, INTERNLM2_CLOSER = (
    "<|action_start|>",
    "<|plugin|>",
    "<|action_end|>",
)
INTERNLM2_OPENER = f"{INTERNLM2_START}{INTERNLM2_PLUGIN}"
# As Intern-S1 writes it.
INTERNLM2_SPACED = tuple(f"{INTERNLM2_START}{space}{INTERNLM2_PLUGIN}" for space in " \n")

INTERNLM2_CALLS = json_object("name", "parameters")

INTERNLM2 = ToolFormat(
    name="internlm2",
    aliases=("internlm", "intern_s1", "interns1"),
    clues=(in_template(INTERNLM2_OPENER), as_tokens(INTERNLM2_START, INTERNLM2_PLUGIN)),
    openers=(INTERNLM2_OPENER, *INTERNLM2_SPACED),
    closers=(INTERNLM2_CLOSER,),
    tokens=(INTERNLM2_START, INTERNLM2_PLUGIN),
    readings=(Reading(JSON_CALLS, end=INTERNLM2_CLOSER),),
    frames=(
        Frame(
            JSON_CALLS,
            INTERNLM2_OPENER,
            call=("\n", *JSON_CALLS.call, INTERNLM2_CLOSER),
            separator=(f"\n{INTERNLM2_OPENER}",),
            is_block=False,
        ),
        # As Intern-S1 writes them.
        Frame(
            INTERNLM2_CALLS,
            INTERNLM2_OPENER,
            call=("\n", *INTERNLM2_CALLS.call, MAYBE_LINE, INTERNLM2_CLOSER),
            separator=(f"\n{INTERNLM2_OPENER}",),
            is_block=False,
        ),
    ),
)


# Jamba, Hunyuan A13B and Apriel: a list of objects in `<tool_calls>`; MiniMax M1: lines of them.

JSON_LIST_OPENER, JSON_LIST_CLOSER = "<tool_calls>", "</tool_calls>"

JSON_LIST = ToolFormat(
    name="json_list",
    aliases=("hunyuan_a13b", "jamba", "apriel"),
    clues=(in_template(JSON_LIST_OPENER),),
    openers=(JSON_LIST_OPENER,),
    closers=(JSON_LIST_CLOSER,),
    readings=(Reading(JSON_CALLS, end=JSON_LIST_CLOSER),),
    frames=(
        _list_of_calls(JSON_LIST_OPENER, JSON_LIST_CLOSER),
        block_between(JSON_LIST_OPENER, JSON_LIST_CLOSER, JSON_CALLS),
        # As Jamba writes them.
        Frame(
            JSON_CALLS,
            JSON_LIST_OPENER,
            begin=("[\n    ",),
            separator=(",\n    ",),
            end=f"\n]{JSON_LIST_CLOSER}",
        ),
    ),
)


# Hunyuan, the dense models of 0.5B to 7B: a name and an object in a fence, in a block.

HUNYUAN_V1_CALLS = NamedJson(
    calls=(
        (
            *(HERMES_OPENER, NAME, f"\n{RWKV_FENCE}\n", ARGUMENTS),
            *(f"\n{RWKV_FENCE_END}", HERMES_CLOSER),
        ),
        (HERMES_OPENER, NAME, "\n", ARGUMENTS, HERMES_CLOSER),
    )
)

HUNYUAN_V1 = ToolFormat(
    name="hunyuan_v1",
    aliases=("hunyuan_v1_dense",),
    clues=(in_template(JSON_LIST_OPENER, f"\n{RWKV_FENCE}\n", f"{RWKV_FENCE_END}{HERMES_CLOSER}"),),
    # The block around the calls may be missing.
    openers=(JSON_LIST_OPENER, HERMES_OPENER),
    closers=(JSON_LIST_CLOSER, HERMES_CLOSER),
    readings=(Reading(HUNYUAN_V1_CALLS, end=JSON_LIST_CLOSER),),
    frames=(Frame(HUNYUAN_V1_CALLS, JSON_LIST_OPENER, end=JSON_LIST_CLOSER),),
    # The arguments themselves are in a fence.
    is_quotable=False,
)


# Llama 3: a bare object, an object after a token, or a name in a tag and JSON after it.
#
# The template of Llama 4 writes a remark between two tokens before the object.

LLAMA3_JSON_OPENER = "<|python_tag|>"

LLAMA3_JSON_CALLS = json_object("name", "parameters")

LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    aliases=("llama3", "llama4_json"),
    clues=(in_template(LLAMA3_JSON_OPENER), in_template(PYTHONIC_PYTHON, '"parameters"')),
    openers=(
        *(LLAMA3_JSON_OPENER, named.TAGGED_JSON_OPENER, named.TAGGED_JSON_SPACED),
        *(PYTHONIC_PYTHON, PYTHONIC_PYTHON_END),
    ),
    leads=("{",),
    closers=(named.TAGGED_JSON_CLOSER,),
    readings=(
        Reading(
            named.TAGGED_JSON_CALLS, openers=(named.TAGGED_JSON_OPENER, named.TAGGED_JSON_SPACED)
        ),
        Reading(LLAMA3_JSON_CALLS, openers=(LLAMA3_JSON_OPENER, PYTHONIC_PYTHON_END, "{")),
        Reading(LLAMA3_JSON_CALLS, openers=(PYTHONIC_PYTHON,), end=PYTHONIC_PYTHON_END),
    ),
    frames=(
        Frame(LLAMA3_JSON_CALLS, '{"name": ', separator=("; ",), is_lead=True),
        Frame(LLAMA3_JSON_CALLS, LLAMA3_JSON_OPENER, separator=("; ",), needs=LLAMA3_JSON_OPENER),
        Frame(named.TAGGED_JSON_CALLS, named.TAGGED_JSON_OPENER),
    ),
)


# Nemotron before version 3: a list of objects in `<TOOLCALL>`.

NEMOTRON_OPENER, NEMOTRON_CLOSER = "<TOOLCALL>", "</TOOLCALL>"

NEMOTRON = ToolFormat(
    name="nemotron",
    aliases=("nemotron_v2", "nemotron_json"),
    clues=(in_template(NEMOTRON_OPENER),),
    openers=(NEMOTRON_OPENER,),
    closers=(NEMOTRON_CLOSER,),
    readings=(Reading(JSON_CALLS, end=NEMOTRON_CLOSER),),
    frames=(_list_of_calls(NEMOTRON_OPENER, NEMOTRON_CLOSER),),
)


# Nemotron Mini: one object per call, each in its own tags.

NEMOTRON_MINI_OPENER, NEMOTRON_MINI_CLOSER = "<toolcall>", "</toolcall>"

NEMOTRON_MINI = ToolFormat(
    name="nemotron_mini",
    aliases=("nemotron4", "hymba"),
    # Its template writes tools and results, but no calls.
    clues=(in_template(NEMOTRON_MINI_OPENER), in_template("<extra_id_1>Tool", "<tool>")),
    openers=(NEMOTRON_MINI_OPENER,),
    closers=(NEMOTRON_MINI_CLOSER,),
    readings=(Reading(JSON_CALLS, end=NEMOTRON_MINI_CLOSER),),
    frames=(
        Frame(
            JSON_CALLS,
            NEMOTRON_MINI_OPENER,
            call=(" ", *JSON_CALLS.call, f" {NEMOTRON_MINI_CLOSER}"),
            separator=(f" {NEMOTRON_MINI_OPENER}",),
            is_block=False,
        ),
    ),
)


# Phi 4 mini: a list of objects between tokens, after `functools`, or bare.

PHI4_OPENER, PHI4_CLOSER = "<|tool_call|>", "<|/tool_call|>"
PHI4_FUNCTOOLS = "functools["
# Around the tools in a prompt.
PHI4_TOOLS, PHI4_TOOLS_END = "<|tool|>", "<|/tool|>"

PHI4 = ToolFormat(
    name="phi4",
    aliases=("phi4_mini_json", "phi4_mini"),
    clues=(
        in_template(PHI4_OPENER, PHI4_TOOLS),
        in_template(PHI4_TOOLS, PHI4_TOOLS_END),
        in_template(PHI4_FUNCTOOLS),
    ),
    openers=(PHI4_OPENER, PHI4_FUNCTOOLS),
    leads=("{", "["),
    closers=(PHI4_CLOSER,),
    readings=(Reading(JSON_CALLS, end=PHI4_CLOSER),),
    frames=(
        _list_of_calls(PHI4_OPENER, PHI4_CLOSER),
        Frame(JSON_CALLS, PHI4_FUNCTOOLS, separator=(", ",), end="]"),
    ),
)


# Sarashina 2.2: a list of objects after a token, or bare; written as Python literals.

SARASHINA_OPENER = "<|tool_calls|>"

SARASHINA = ToolFormat(
    name="sarashina",
    aliases=("sarashina2",),
    clues=(Clue(anywhere=(SARASHINA_OPENER,)),),
    openers=(SARASHINA_OPENER,),
    leads=("[", "{"),
    readings=(Reading(JSON_CALLS),),
    frames=(_list_of_calls(SARASHINA_OPENER),),
)


# xLAM 2: a bare list of objects as the whole reply.

XLAM_LEAD, XLAM_LEAD_END = "[", "]"

XLAM = ToolFormat(
    name="xlam",
    # The second is that of Hammer, and of xLAM 1, whose list is in an object.
    clues=(
        in_template("single JSON array"),
        in_template("MUST strictly adhere to the following JSON format"),
    ),
    # The models are tuned from Qwen's and Mistral's, and fall back to their markers.
    openers=(HERMES_OPENER, named.MISTRAL_OPENER),
    leads=(XLAM_LEAD, "{"),
    closers=(HERMES_CLOSER,),
    readings=(
        Reading(JSON_CALLS, openers=(HERMES_OPENER,), end=HERMES_CLOSER),
        Reading(JSON_CALLS),
    ),
    frames=(Frame(JSON_CALLS, XLAM_LEAD, separator=(", ",), end=XLAM_LEAD_END, is_lead=True),),
)


# The markers of other families. Models write calls in JSON between these, whatever their own are.

_ENDS = {
    HERMES_OPENER: HERMES_CLOSER,
    HERMES_TOOLS_OPENER: HERMES_TOOLS_CLOSER,
    JSON_LIST_OPENER: JSON_LIST_CLOSER,
    NEMOTRON_OPENER: NEMOTRON_CLOSER,
    NEMOTRON_OPENER.lower(): NEMOTRON_CLOSER.lower(),
    OLMO3_OPENER: OLMO3_CLOSER,
    GRANITE_20B_FC_OPENER: GRANITE_20B_FC_CLOSER,
    PHI4_OPENER: PHI4_CLOSER,
    named.MISTRAL_OPENER: "[/TOOL_CALLS]",
    # As LM Studio asks for them.
    "[TOOL_REQUEST]": "[END_TOOL_REQUEST]",
    SARASHINA_OPENER: "",
    LLAMA3_JSON_OPENER: "",
    INTERNLM2_OPENER: INTERNLM2_CLOSER,
    "```tool_call\n": TOOL_CODE_FENCE_END,
}
OTHER_MARKERS = (
    *(Reading(JSON_CALLS, openers=(opener,), end=end) for opener, end in _ENDS.items()),
    Reading(named.TAGGED_JSON_CALLS, openers=(named.TAGGED_JSON_OPENER,)),
)
