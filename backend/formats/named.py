"""Formats that write a name, then its arguments as JSON."""

from backend.formats.dialects import (
    ARGUMENTS,
    INDEX,
    MAYBE_SPACE,
    NAME,
    QUOTED_NAME,
    Characters,
    Id,
    Markup,
    Maybe,
    NamedJson,
    Objects,
    Reading,
)
from backend.formats.format import (
    Clue,
    Frame,
    ReasoningFormat,
    Section,
    ToolFormat,
    as_tokens,
    in_template,
)

# A name in a tag and JSON after it, `<function=f>{…}</function>`.
#
# Llama models learnt it from one of Meta's prompts; Functionary 3.1 writes it too.

TAGGED_JSON_OPENER, TAGGED_JSON_CLOSER = "<function=", "</function>"
# As small models write it.
TAGGED_JSON_SPACED = "<function "

TAGGED_JSON_CALLS = NamedJson(
    calls=((TAGGED_JSON_OPENER, NAME, ">", ARGUMENTS, TAGGED_JSON_CLOSER),)
)


# Apertus: a list of objects keyed by the name of the tool, `[{"f": {…}}]`.

APERTUS_OPENER, APERTUS_CLOSER = "<|tools_prefix|>", "<|tools_suffix|>"
APERTUS_THOUGHT_START, APERTUS_THOUGHT_END = "<|inner_prefix|>", "<|inner_suffix|>"

APERTUS_CALLS = NamedJson(calls=(("{", QUOTED_NAME, ": ", ARGUMENTS, "}"),), is_list=True)

APERTUS = ToolFormat(
    name="apertus",
    aliases=("apertus2509",),
    clues=(in_template(APERTUS_OPENER),),
    openers=(APERTUS_OPENER,),
    closers=(APERTUS_CLOSER,),
    readings=(Reading(APERTUS_CALLS, end=APERTUS_CLOSER),),
    frames=(
        Frame(
            APERTUS_CALLS, APERTUS_OPENER, begin=("[",), separator=(", ",), end=f"]{APERTUS_CLOSER}"
        ),
    ),
    # The inner part of a reply also contains its calls.
    has_drafts=False,
)

APERTUS_THOUGHT = ReasoningFormat(
    name="apertus_inner",
    aliases=("apertus", "apertus2509"),
    clues=(as_tokens(APERTUS_THOUGHT_START, APERTUS_THOUGHT_END),),
    starts=(APERTUS_THOUGHT_START,),
    ends=(APERTUS_THOUGHT_END,),
)


# DeepSeek up to V3.2-Exp: markers in fullwidth bars.
#
# V3 and R1 write the call's type, its name, and JSON in a fence; V3.1 writes name and JSON.
# Both are read for either: distilled models mix them up.

DEEPSEEK_OPENER, DEEPSEEK_CLOSER = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_BEGIN, DEEPSEEK_SEPARATOR, DEEPSEEK_END = (
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)

DEEPSEEK_PLAIN = (DEEPSEEK_BEGIN, NAME, DEEPSEEK_SEPARATOR, ARGUMENTS, DEEPSEEK_END)
DEEPSEEK_FENCED = (
    DEEPSEEK_BEGIN,
    f"function{DEEPSEEK_SEPARATOR}",
    NAME,
    "\n```json\n",
    ARGUMENTS,
    "\n```",
    DEEPSEEK_END,
)


def _deepseek_format(
    name: str, calls: NamedJson, *, clue: Clue, separator: str = "", aliases: tuple[str, ...] = ()
) -> ToolFormat:
    """Return the format of one DeepSeek generation, whose own way to write `calls` is the first."""
    between = (separator,) if separator else ()
    frame = Frame(calls, DEEPSEEK_OPENER, separator=between, end=DEEPSEEK_CLOSER)
    return ToolFormat(
        name=name,
        aliases=aliases,
        clues=(clue,),
        # The block around the calls may be missing.
        openers=(DEEPSEEK_OPENER, DEEPSEEK_BEGIN),
        closers=(DEEPSEEK_CLOSER,),
        tokens=(DEEPSEEK_SEPARATOR, DEEPSEEK_END),
        readings=(Reading(calls, end=DEEPSEEK_CLOSER),),
        frames=(frame,),
    )


# DeepSeek V3 and R1.

DEEPSEEK_V3 = _deepseek_format(
    "deepseek_v3",
    NamedJson(calls=(DEEPSEEK_FENCED, DEEPSEEK_PLAIN)),
    clue=Clue(template=("```json",), anywhere=(DEEPSEEK_OPENER,)),
    separator="\n",
    aliases=("deepseek", "deepseek_r1", "deepseekv3"),
)


# DeepSeek V3.1 and V3.2-Exp.

DEEPSEEK_V31 = _deepseek_format(
    "deepseek_v31",
    NamedJson(calls=(DEEPSEEK_PLAIN, DEEPSEEK_FENCED)),
    clue=Clue(anywhere=(DEEPSEEK_OPENER,)),
    aliases=("deepseekv31",),
)


# Functionary 3.2: `>>>f` and JSON on the next line, or `>>>all` and text.
#
# The prompt ends with the first `>>>`, so the reply begins with a recipient.

FUNCTIONARY_OPENER = ">>>"
FUNCTIONARY_TO_ALL = "all\n"

FUNCTIONARY_CALLS = NamedJson(calls=((NAME, "\n", ARGUMENTS),))

FUNCTIONARY = ToolFormat(
    name="functionary",
    clues=(in_template(f"{FUNCTIONARY_OPENER}all"), in_template(f"'{FUNCTIONARY_OPENER}'")),
    openers=(FUNCTIONARY_OPENER, TAGGED_JSON_OPENER),
    readings=(
        Reading(TAGGED_JSON_CALLS, openers=(TAGGED_JSON_OPENER,)),
        Reading(
            Markup(FUNCTIONARY_TO_ALL),
            openers=("", FUNCTIONARY_OPENER),
            begins=(FUNCTIONARY_TO_ALL,),
        ),
        # Not every prompt ends with it: then the router meets the opener.
        Reading(Markup(""), openers=("",), begins=(FUNCTIONARY_OPENER,)),
        Reading(FUNCTIONARY_CALLS, openers=("", FUNCTIONARY_OPENER)),
    ),
    owns_reply=True,
    frames=(Frame(FUNCTIONARY_CALLS, "", separator=(FUNCTIONARY_OPENER,)),),
    around=Section(begin=FUNCTIONARY_TO_ALL, end=FUNCTIONARY_OPENER),
)


# GLM 4 up to 0414, and GLM Z1: a name where a message begins, and JSON on the next line.
#
# Answers begin with the line break. Later messages have a mark, the first one's is in the prompt.

GLM4_0414_OPENER = "<|assistant|>"
GLM4_0414_CALLS = NamedJson(calls=((NAME, "\n", ARGUMENTS),))

GLM4_0414 = ToolFormat(
    name="glm4_0414",
    aliases=("glm_z1", "glm4_9b", "chatglm4"),
    clues=(in_template("请使用 Json 格式表示调用的参数"),),
    openers=(GLM4_0414_OPENER,),
    name_lead="\n{",
    readings=(Reading(GLM4_0414_CALLS),),
    frames=(
        Frame(GLM4_0414_CALLS, "", separator=(GLM4_0414_OPENER,), is_lead=True),
        # After an answer.
        Frame(GLM4_0414_CALLS, GLM4_0414_OPENER, separator=(GLM4_0414_OPENER,), is_lapse=True),
    ),
)


# Kimi K2: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}`.
#
# Later turns refer to the id written by the model, so it is kept.

KIMI_K2_OPENER, KIMI_K2_CLOSER = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
# Some models write the section markers in the singular.
KIMI_K2_ONE_OPENER, KIMI_K2_ONE_CLOSER = "<|tool_call_section_begin|>", "<|tool_call_section_end|>"
KIMI_K2_BEGIN, KIMI_K2_ARGUMENTS_BEGIN = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
KIMI_K2_END = "<|tool_call_end|>"

KIMI_K2_CALLS = NamedJson(
    calls=(
        (
            KIMI_K2_BEGIN,
            Id(("functions.", NAME, ":", INDEX)),
            KIMI_K2_ARGUMENTS_BEGIN,
            ARGUMENTS,
            KIMI_K2_END,
        ),
    )
)

KIMI_K2 = ToolFormat(
    name="kimi_k2",
    clues=(in_template(KIMI_K2_OPENER),),
    # The section around the calls may be missing.
    openers=(KIMI_K2_OPENER, KIMI_K2_ONE_OPENER, KIMI_K2_BEGIN),
    closers=(KIMI_K2_CLOSER, KIMI_K2_ONE_CLOSER, KIMI_K2_END),
    tokens=(KIMI_K2_ARGUMENTS_BEGIN,),
    readings=(Reading(KIMI_K2_CALLS, end=KIMI_K2_CLOSER, other_ends=(KIMI_K2_ONE_CLOSER,)),),
    frames=(Frame(KIMI_K2_CALLS, KIMI_K2_OPENER, end=KIMI_K2_CLOSER),),
)


# MiroThinker: a server name, a tool name and JSON in MCP tags.

MIROTHINKER_OPENER, MIROTHINKER_CLOSER = "<use_mcp_tool>", "</use_mcp_tool>"

MIROTHINKER_CALLS = NamedJson(
    calls=(
        (
            *(MIROTHINKER_OPENER, "\n<server_name>"),
            *(Characters("[A-Za-z0-9_ .:-]{1,64}"), "</server_name>"),
            *("\n<tool_name>", NAME, "</tool_name>\n<arguments>\n", ARGUMENTS),
            *("\n</arguments>", f"\n{MIROTHINKER_CLOSER}"),
        ),
    )
)

MIROTHINKER = ToolFormat(
    name="mirothinker",
    aliases=("mcp",),
    clues=(in_template(MIROTHINKER_OPENER),),
    openers=(MIROTHINKER_OPENER,),
    closers=(MIROTHINKER_CLOSER,),
    readings=(Reading(MIROTHINKER_CALLS),),
    frames=(Frame(MIROTHINKER_CALLS, MIROTHINKER_OPENER, separator=("\n",), is_block=False),),
)


# Mistral: `[TOOL_CALLS]` and a JSON list, or a name and its arguments.
#
# Tokenizers up to v7 use the list, `[{"name": …, "arguments": {…}, "id": …}]`; from v11 on they
# use `f[CALL_ID]…[ARGS]{…}` and `f[ARGS]{…}`, each call after its own marker.

MISTRAL_OPENER, MISTRAL_CALL_ID, MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MISTRAL_THINK, MISTRAL_THINK_END = "[THINK]", "[/THINK]"
MISTRAL_ID_CHARS = 9

_MISTRAL_ID = Id((Characters(f"[a-zA-Z0-9]{{{MISTRAL_ID_CHARS}}}"),))
MISTRAL_HEADS = NamedJson(
    calls=((MISTRAL_OPENER, NAME, Maybe((MISTRAL_CALL_ID, _MISTRAL_ID)), MISTRAL_ARGS, ARGUMENTS),)
)
MISTRAL_LIST = Objects(
    (
        *('{"name": ', QUOTED_NAME, ', "arguments": ', ARGUMENTS),
        *(Maybe((', "id": "', _MISTRAL_ID, '"')), "}"),
    )
)

MISTRAL = ToolFormat(
    name="mistral",
    aliases=("mistral_v11", "magistral"),
    clues=(Clue(anywhere=(MISTRAL_OPENER,)),),
    openers=(MISTRAL_OPENER,),
    tokens=(MISTRAL_CALL_ID, MISTRAL_ARGS),
    leaks=("[/TOOL_CALLS]",),
    readings=(Reading(MISTRAL_LIST, begins=("[", "{")), Reading(MISTRAL_HEADS)),
    frames=(
        Frame(MISTRAL_HEADS, MISTRAL_OPENER, needs=MISTRAL_ARGS, is_block=False),
        Frame(
            MISTRAL_LIST,
            MISTRAL_OPENER,
            begin=(MAYBE_SPACE, "["),
            separator=(", ",),
            end="]",
            lacks=MISTRAL_ARGS,
        ),
    ),
    id_chars=MISTRAL_ID_CHARS,
)

MISTRAL_THOUGHT = ReasoningFormat(
    name="mistral_think",
    aliases=("mistral", "magistral", "ministral"),
    clues=(as_tokens(MISTRAL_THINK, MISTRAL_THINK_END),),
    starts=(MISTRAL_THINK,),
    ends=(MISTRAL_THINK_END,),
)


# PLaMo 3: a name and JSON, each between markers that begin and end alike.
#
# A marker is several tokens: `<|plamo:begin_`, its words, `:plamo|>`.

# The tokens at both ends of a marker.
PLAMO3_BEGIN, PLAMO3_END, PLAMO3_MARKER_END = "<|plamo:begin_", "<|plamo:end_", ":plamo|>"


def _plamo3_around(words: str) -> tuple[str, str]:
    """Return the markers before and after a part."""
    return f"{PLAMO3_BEGIN}{words}{PLAMO3_MARKER_END}", f"{PLAMO3_END}{words}{PLAMO3_MARKER_END}"


PLAMO3_OPENER, PLAMO3_CLOSER = _plamo3_around("tool_requests")
PLAMO3_CALL, PLAMO3_CALL_END = _plamo3_around("tool_request")
PLAMO3_NAME_BEGIN, PLAMO3_NAME_END = _plamo3_around("tool_name")
PLAMO3_ARGUMENTS_BEGIN, PLAMO3_ARGUMENTS_END = _plamo3_around("tool_arguments")
PLAMO3_THINK, PLAMO3_THINK_END = _plamo3_around("think")
PLAMO3_CONSTRAIN, PLAMO3_MESSAGE = "<|plamo:constrain|>", "<|plamo:msg|>"
PLAMO3_TURN_END = "<|plamo:tag|>"

_PLAMO3_HEAD = (PLAMO3_CALL, PLAMO3_NAME_BEGIN, NAME, PLAMO3_NAME_END, PLAMO3_ARGUMENTS_BEGIN)
_PLAMO3_REST = (ARGUMENTS, PLAMO3_ARGUMENTS_END, PLAMO3_CALL_END)
PLAMO3_CALLS = NamedJson(
    calls=(
        (*_PLAMO3_HEAD, f"{PLAMO3_CONSTRAIN}json{PLAMO3_MESSAGE}", *_PLAMO3_REST),
        (*_PLAMO3_HEAD, Maybe((PLAMO3_MESSAGE,)), *_PLAMO3_REST),
    )
)

PLAMO3 = ToolFormat(
    name="plamo3",
    aliases=("plamo",),
    clues=(in_template(PLAMO3_OPENER), in_template(PLAMO3_BEGIN, "tool_request")),
    openers=(PLAMO3_OPENER, PLAMO3_CALL),
    closers=(PLAMO3_CLOSER, PLAMO3_CALL_END),
    leaks=(PLAMO3_TURN_END,),
    tokens=(PLAMO3_CONSTRAIN, PLAMO3_MESSAGE, PLAMO3_BEGIN, PLAMO3_END, PLAMO3_MARKER_END),
    readings=(Reading(PLAMO3_CALLS, end=PLAMO3_CLOSER),),
    frames=(Frame(PLAMO3_CALLS, PLAMO3_OPENER, end=PLAMO3_CLOSER),),
)

PLAMO3_THOUGHT = ReasoningFormat(
    name="plamo_think",
    aliases=("plamo3", "plamo"),
    clues=(in_template(PLAMO3_THINK), in_template(PLAMO3_BEGIN, "think"), as_tokens(PLAMO3_THINK)),
    starts=(PLAMO3_THINK,),
    ends=(PLAMO3_THINK_END,),
)


# Solar Open: `<|tool_call:begin|>ID<|tool_call:name|>f<|tool_call:args|>{…}<|tool_call:end|>`.

SOLAR_OPEN_OPENER, SOLAR_OPEN_CLOSER = "<|tool_calls|>", "<|calls|>"
SOLAR_OPEN_BEGIN, SOLAR_OPEN_END = "<|tool_call:begin|>", "<|tool_call:end|>"
SOLAR_OPEN_NAME_TAG, SOLAR_OPEN_ARGS_TAG = "<|tool_call:name|>", "<|tool_call:args|>"
SOLAR_OPEN_THINK, SOLAR_OPEN_THINK_END, SOLAR_OPEN_CONTENT = "<|think|>", "<|end|>", "<|content|>"
SOLAR_OPEN_NEXT = "<|begin|>assistant"

SOLAR_OPEN_CALLS = NamedJson(
    calls=(
        (
            SOLAR_OPEN_BEGIN,
            Id((Characters("[a-z0-9]{8}"),)),
            SOLAR_OPEN_NAME_TAG,
            NAME,
            SOLAR_OPEN_ARGS_TAG,
            ARGUMENTS,
            SOLAR_OPEN_END,
        ),
    )
)

SOLAR_OPEN = ToolFormat(
    name="solar_open",
    clues=(in_template(SOLAR_OPEN_BEGIN), as_tokens(SOLAR_OPEN_BEGIN, SOLAR_OPEN_NAME_TAG)),
    openers=(SOLAR_OPEN_OPENER, SOLAR_OPEN_BEGIN),
    closers=(SOLAR_OPEN_CLOSER,),
    tokens=(SOLAR_OPEN_NAME_TAG, SOLAR_OPEN_ARGS_TAG, SOLAR_OPEN_END),
    readings=(Reading(SOLAR_OPEN_CALLS, end=SOLAR_OPEN_CLOSER),),
    frames=(Frame(SOLAR_OPEN_CALLS, SOLAR_OPEN_OPENER, end=SOLAR_OPEN_CLOSER),),
)

SOLAR_OPEN_THOUGHT = ReasoningFormat(
    name="solar_think",
    aliases=("solar_open",),
    clues=(
        in_template(SOLAR_OPEN_THINK, SOLAR_OPEN_CONTENT),
        as_tokens(SOLAR_OPEN_THINK, SOLAR_OPEN_CONTENT),
    ),
    starts=(SOLAR_OPEN_THINK,),
    ends=(SOLAR_OPEN_THINK_END,),
    frames=(SOLAR_OPEN_NEXT, SOLAR_OPEN_CONTENT, "<|flush|>"),
    tokens=("<|begin|>",),
    bridge=SOLAR_OPEN_NEXT,
    answer=SOLAR_OPEN_CONTENT,
)
