"""Formats that write arguments in tags."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import starmap

from backend.formats.dialects import (
    ARGUMENTS,
    INDEX,
    JSON_CALLS,
    KEY,
    MAYBE_LINE,
    NAME,
    TYPE,
    VALUE,
    Reading,
    Tags,
    Template,
)
from backend.formats.format import (
    Clue,
    FormatEvidence,
    Frame,
    ReasoningFormat,
    Section,
    ToolFormat,
    as_tokens,
    block_between,
    calls_between,
    in_template,
)

# Arguments as pairs, `<arg_key>a</arg_key><arg_value>…</arg_value>`.

KEY_TAG = "<arg_key>"


def pairs(begin: Template, end: str, prefix: str = "", suffix: str = "") -> Tags:
    """Return calls whose arguments are pairs, in tags with a text before and after each name."""
    key, value = f"{prefix}arg_key{suffix}>", f"{prefix}arg_value{suffix}>"
    return Tags(
        call=(*begin, ARGUMENTS, end),
        parameter=(
            *(f"<{key}", KEY, f"</{key}", MAYBE_LINE),
            *(f"<{value}", VALUE, f"</{value}", MAYBE_LINE),
        ),
    )


def _pair_tags(tags: Tags) -> tuple[str, ...]:
    """Return the tags around keys and values."""
    return tuple(part for part in tags.parameter if isinstance(part, str))


# DeepSeek V3.2, V4, V4.1 and GigaChat 3.5: `<｜DSML｜invoke name="f">` and in it
# `<｜DSML｜parameter name="a" string="true">`.
#
# Families differ in the mark, versions in the name of the block and in the text between the mark
# and a tag's word. The empty line before a block belongs to the block.

DSML_MARK, GCML_MARK = "｜DSML｜", "｜GCML｜"
# As models misspell it, or leave it out.
DSML_OTHER_MARKS = ("｜｜DSML｜｜", "|DSML|", "||DSML||", " | DSML | ", "‖DSML‖", "")
DSML_BLOCKS = (
    *(("", "function_calls"), ("", "tool_calls"), (" ", "calls"), ("r:", "tool_calls")),
    # V4 Flash sometimes drops the underscore, or takes another word.
    *(("", "toolcalls"), ("", "tool_use"), ("", "calls")),
)
GCML_BLOCKS = (("", "tool_calls"),)
MARKED_EMPTY_LINE = "\n\n"
_MARKED_TYPES = dict.fromkeys(("object", "array", "number", "integer", "boolean", "null"), "false")


def _marked_tags(mark: str) -> Tags:
    """Return calls in tags that all begin with a mark, as attributes tell types apart."""
    begin, end = f"<{mark}", f"</{mark}"
    return Tags(
        call=(f'{begin}invoke name="', NAME, '">\n', ARGUMENTS, f"{end}invoke>"),
        parameter=(
            *(f'{begin}parameter name="', KEY, '" string="', TYPE, '">'),
            *(VALUE, f"{end}parameter>\n"),
        ),
        types={"string": "true", **_MARKED_TYPES},
    )


def _marked(
    name: str,
    aliases: tuple[str, ...],
    mark: str,
    blocks: tuple[tuple[str, str], ...],
    leaks: tuple[str, ...] = (),
    other_marks: tuple[str, ...] = (),
) -> ToolFormat:
    """Return the format of a family that begins all tags with a mark.

    Args:
        blocks: The text after the mark and the word of the block, of each version.
        other_marks: Other marks; without one, blocks have no text before their word.
    """
    marked = [(f"{mark}{between}", block) for between, block in blocks]
    others = ((each, *kind) for each in other_marks for kind in blocks if each or not kind[0])
    marked += [(f"{each}{between}", block) for each, between, block in others]
    ends = tuple(f"</{begin}{block}>" for begin, block in marked)

    def reading(begin: str, block: str) -> Reading:
        opener, end = (f"<{slash}{begin}{block}>" for slash in ("", "/"))
        openers = (opener, MARKED_EMPTY_LINE + opener)
        return Reading(_marked_tags(begin), openers=openers, end=end, other_ends=ends)

    def call_reading(begin: str) -> Reading:
        """Return the reading of a call without a surrounding block."""
        return Reading(_marked_tags(begin), openers=(f"<{begin}invoke",), other_ends=ends)

    block_readings = tuple(starmap(reading, marked))
    call_readings = tuple(map(call_reading, dict.fromkeys(begin for begin, _ in marked)))
    return ToolFormat(
        name=name,
        aliases=aliases,
        clues=(in_template(mark), as_tokens(mark)),
        openers=(
            *(reading.openers[0] for reading in block_readings),
            *(reading.openers[1] for reading in block_readings),
            *(reading.openers[0] for reading in call_readings),
        ),
        closers=ends,
        tokens=(mark,),
        leaks=leaks,
        readings=(*block_readings, *call_readings),
        frames=tuple(
            block_between(reading.openers[0], reading.end, reading.dialect)
            for reading in block_readings[:3]
        ),
    )


DSML = _marked(
    "deepseek_dsml",
    (
        *("deepseek_v32", "deepseekv32", "deepseek_v4", "deepseekv4"),
        *("deepseek_v41", "deepseekv41", "dsml"),
    ),
    DSML_MARK,
    DSML_BLOCKS,
    other_marks=DSML_OTHER_MARKS,
)
GIGACHAT35 = _marked(
    "gigachat35", ("gigachat3_5", "gcml"), GCML_MARK, GCML_BLOCKS, leaks=("<|message_sep|>",)
)


# GLM: a name and pairs, with newlines between the tags (4.5, 4.6) or without (4.7 and later).


# The vision models frame the result of an answer.
GLM_BOXES = ("<|begin_of_box|>", "<|end_of_box|>")


def _glm(
    name: str,
    aliases: tuple[str, ...],
    opener: str,
    closer: str,
    clues: tuple[Clue, ...],
    boxes: tuple[str, ...] = (),
) -> ToolFormat:
    """Return the format of a family that writes like GLM between markers of its own."""
    tags = pairs((opener, NAME, MAYBE_LINE), closer)
    return ToolFormat(
        name=name,
        aliases=aliases,
        clues=clues,
        openers=(opener,),
        closers=(closer,),
        tokens=_pair_tags(tags),
        boxes=boxes,
        # Small models sometimes write JSON between the markers.
        readings=(Reading(JSON_CALLS, begins=("{", "["), end=closer), Reading(tags)),
        frames=(Frame(tags, opener, separator=(MAYBE_LINE,), is_block=False),),
    )


GLM4 = _glm(
    name="glm4",
    aliases=(
        *("_glm", "glm", "glm45", "glm47", "glm4_moe", "glm47_moe"),
        *("poolside_v1", "spark3", "spark25", "ling3", "hyperclovax_seed_think"),
    ),
    opener="<tool_call>",
    closer="</tool_call>",
    clues=(in_template(KEY_TAG),),
    boxes=GLM_BOXES,
)


# Hunyuan 3: pairs as in GLM, but with an end of the name and a block around all calls.


def _hunyuan(
    name: str,
    aliases: tuple[str, ...],
    suffix: str = "",
    *,
    has_key_clue: bool = False,
    has_name_end: bool = True,
    own: Callable[[FormatEvidence], ToolFormat | None] | None = None,
) -> ToolFormat:
    """Return the format of one kind of checkpoint.

    Args:
        suffix: Appended to all tag names.
        has_key_clue: Whether the evidence must also contain the tag of a key.
        has_name_end: Whether a tag ends the name.
        own: Finds the format of one checkpoint, in place of clues.
    """
    call, call_end = f"<tool_call{suffix}>", f"</tool_call{suffix}>"
    opener, closer = f"<tool_calls{suffix}>", f"</tool_calls{suffix}>"
    name_end = f"<tool_sep{suffix}>"
    after_name = f"{name_end}\n" if has_name_end else MAYBE_LINE
    tags = pairs((call, NAME, after_name), call_end, suffix=suffix)
    key_tag = _pair_tags(tags)[0]
    clue = Clue(anywhere=(name_end, key_tag) if has_key_clue else (name_end,))
    return ToolFormat(
        name=name,
        aliases=aliases,
        clues=() if own else (clue,),
        own=own,
        openers=(opener, call),
        closers=(closer, call_end),
        tokens=(*((name_end,) if has_name_end else ()), *_pair_tags(tags)),
        readings=(Reading(tags, end=closer),),
        frames=(block_between(opener, closer, tags),),
    )


# Hunyuan 3.

HUNYUAN_V3 = _hunyuan("hunyuan_v3", ("hy_v3", "hy3", "hunyuan", "_hunyuan"), has_key_clue=True)


# Hunyuan 3 as released, with a suffix on all tags, `<tool_call:opensource>`.

HUNYUAN_V3_OPENSOURCE_SUFFIX = ":opensource"
HUNYUAN_V3_OPENSOURCE_THINK = f"<think{HUNYUAN_V3_OPENSOURCE_SUFFIX}>"

HUNYUAN_V3_OPENSOURCE = _hunyuan(
    "hunyuan_v3_opensource", ("hy_v3_opensource",), HUNYUAN_V3_OPENSOURCE_SUFFIX
)

HUNYUAN_V3_OPENSOURCE_THOUGHT = ReasoningFormat(
    name="hunyuan_think",
    aliases=("hy_v3_opensource",),
    clues=(as_tokens(HUNYUAN_V3_OPENSOURCE_THINK), in_template(HUNYUAN_V3_OPENSOURCE_THINK)),
    starts=(HUNYUAN_V3_OPENSOURCE_THINK,),
    ends=(f"</think{HUNYUAN_V3_OPENSOURCE_SUFFIX}>",),
)


# Hunyuan 4: the tags of Hunyuan 3 with a suffix per checkpoint, and often no end of the name.
#
# The suffix is in the vocabulary: `<tool_calls:6124c78e>`, `<think:6124c78e>`.

# That of the first checkpoints, for replies without one to look at.
HUNYUAN_V4_SUFFIX = ":6124c78e"
_HUNYUAN_V4_KEY = re.compile(r"<arg_key(:[\w.-]{1,32})>")
_HUNYUAN_V4_THINK = re.compile(r"<think(:[\w.-]{1,32})>")


def _hunyuan_v4_own_tools(evidence: FormatEvidence) -> ToolFormat | None:
    suffix = evidence.find(_HUNYUAN_V4_KEY)
    if not suffix:
        return None
    return _hunyuan_v4_tools(suffix, has_name_end=evidence.has(f"<tool_sep{suffix}>"))


def _hunyuan_v4_own_thought(evidence: FormatEvidence) -> ReasoningFormat | None:
    suffix = evidence.find(_HUNYUAN_V4_THINK)
    return _hunyuan_v4_thought(suffix) if suffix else None


@cache
def _hunyuan_v4_tools(suffix: str, *, has_name_end: bool = False) -> ToolFormat:
    aliases = ("hy_v4", "hy4")
    return _hunyuan(
        "hunyuan_v4", aliases, suffix, has_name_end=has_name_end, own=_hunyuan_v4_own_tools
    )


@cache
def _hunyuan_v4_thought(suffix: str) -> ReasoningFormat:
    return ReasoningFormat(
        name="hunyuan_v4_think",
        aliases=("hy_v4",),
        starts=(f"<think{suffix}>",),
        ends=(f"</think{suffix}>",),
        own=_hunyuan_v4_own_thought,
    )


HUNYUAN_V4, HUNYUAN_V4_THOUGHT = (
    _hunyuan_v4_tools(HUNYUAN_V4_SUFFIX),
    _hunyuan_v4_thought(HUNYUAN_V4_SUFFIX),
)


# iQuest Coder V2: pairs as in GLM, between markers of its own.

IQUEST_CODER_OPENER = "<iquestcoder_tool_call>"

IQUEST_CODER = _glm(
    name="iquest_coder",
    aliases=("iquest_coder_v2", "iquest_q1"),
    opener=IQUEST_CODER_OPENER,
    closer="</iquestcoder_tool_call>",
    clues=(in_template(IQUEST_CODER_OPENER), as_tokens(IQUEST_CODER_OPENER)),
)


# K2 Horizon: a name and pairs in `<ifm|…>` tags, with the type of a value between, or JSON.

K2_HORIZON_OPENER, K2_HORIZON_CLOSER = "<ifm|tool_calls>", "</ifm|tool_calls>"
K2_HORIZON_CALL, K2_HORIZON_CALL_END = "<ifm|tool_call>", "</ifm|tool_call>"
# By the effort that the request asks for.
K2_HORIZON_EFFORTS = ("think", "think_fast", "think_faster")
K2_HORIZON_STARTS = tuple(f"<ifm|{effort}>" for effort in K2_HORIZON_EFFORTS)

K2_HORIZON_TAGS = replace(
    pairs((K2_HORIZON_CALL, NAME, "\n"), K2_HORIZON_CALL_END, "ifm|"),
    type_tag=("<ifm|arg_type>", TYPE, "</ifm|arg_type>"),
)

K2_HORIZON = ToolFormat(
    name="k2_horizon",
    aliases=("k2_v3",),
    clues=(in_template(K2_HORIZON_CALL), as_tokens(K2_HORIZON_CALL)),
    openers=(K2_HORIZON_OPENER, K2_HORIZON_CALL),
    closers=(K2_HORIZON_CLOSER, K2_HORIZON_CALL_END),
    tokens=_pair_tags(K2_HORIZON_TAGS),
    readings=(
        Reading(JSON_CALLS, openers=(K2_HORIZON_CALL,), begins=("{", "["), end=K2_HORIZON_CALL_END),
        Reading(K2_HORIZON_TAGS, end=K2_HORIZON_CLOSER),
    ),
    frames=(block_between(K2_HORIZON_OPENER, K2_HORIZON_CLOSER, K2_HORIZON_TAGS),),
)

K2_HORIZON_THOUGHT = ReasoningFormat(
    name="k2_think",
    aliases=("k2_horizon",),
    clues=(in_template(K2_HORIZON_STARTS[0]), as_tokens(K2_HORIZON_STARTS[0])),
    starts=K2_HORIZON_STARTS,
    ends=tuple(f"</ifm|{effort}>" for effort in K2_HORIZON_EFFORTS),
)


# Kimi K3: tags between special tokens, `<|open|>call tool="f" index="1"<|sep|>…`.
#
# Argument tags carry types. Some calls have all arguments as one JSON object.

KIMI_K3_OPEN, KIMI_K3_CLOSE, KIMI_K3_SEP = "<|open|>", "<|close|>", "<|sep|>"
KIMI_K3_MESSAGE_END = "<|end_of_msg|>"
_KIMI_K3_TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")


def _kimi_k3_open(name: str) -> str:
    return f"{KIMI_K3_OPEN}{name}{KIMI_K3_SEP}"


def _kimi_k3_close(name: str) -> str:
    return f"{KIMI_K3_CLOSE}{name}{KIMI_K3_SEP}"


KIMI_K3_OPENER, KIMI_K3_CLOSER = _kimi_k3_open("tools"), _kimi_k3_close("tools")
KIMI_K3_CALL = f"{KIMI_K3_OPEN}call"

KIMI_K3_TAGS = Tags(
    call=(
        *(f'{KIMI_K3_OPEN}call tool="', NAME, '" index="', INDEX, f'"{KIMI_K3_SEP}'),
        *(ARGUMENTS, _kimi_k3_close("call")),
    ),
    parameter=(
        *(f'{KIMI_K3_OPEN}argument key="', KEY, '" type="', TYPE, f'"{KIMI_K3_SEP}'),
        *(VALUE, _kimi_k3_close("argument")),
    ),
    types={name: name for name in _KIMI_K3_TYPES} | {"integer": "number"},
    escapes_attributes=True,
    object=(
        *(f'{KIMI_K3_OPEN}json type="', TYPE, f'"{KIMI_K3_SEP}'),
        *(ARGUMENTS, _kimi_k3_close("json")),
    ),
)
_KIMI_K3_CLUE = as_tokens(KIMI_K3_OPEN, KIMI_K3_CLOSE, KIMI_K3_SEP, KIMI_K3_MESSAGE_END)

KIMI_K3 = ToolFormat(
    name="kimi_k3",
    clues=(_KIMI_K3_CLUE,),
    openers=(KIMI_K3_OPENER, KIMI_K3_CALL),
    closers=(KIMI_K3_CLOSER,),
    tokens=(KIMI_K3_OPEN, KIMI_K3_CLOSE, KIMI_K3_SEP),
    readings=(Reading(KIMI_K3_TAGS, end=KIMI_K3_CLOSER),),
    frames=(
        Frame(
            KIMI_K3_TAGS,
            KIMI_K3_OPENER,
            end=f"{KIMI_K3_CLOSER}{_kimi_k3_close('message')}{KIMI_K3_MESSAGE_END}",
        ),
    ),
    around=Section(
        begin=_kimi_k3_open("response"),
        end=_kimi_k3_close("response"),
        may_be_open=True,
        closes=True,
    ),
    is_quotable=False,
)

KIMI_K3_THOUGHT = ReasoningFormat(
    name="xtml_think",
    aliases=("kimi_k3",),
    clues=(_KIMI_K3_CLUE,),
    starts=(_kimi_k3_open("think"),),
    # The start of an answer ends a thought that was not closed, or whose end lacks its last token.
    ends=(
        *(_kimi_k3_close("think"), _kimi_k3_open("response")),
        f"{KIMI_K3_CLOSE}think{_kimi_k3_open('response')}",
    ),
    frames=(_kimi_k3_close("response"), _kimi_k3_close("message"), KIMI_K3_MESSAGE_END),
    tokens=(KIMI_K3_OPEN, KIMI_K3_CLOSE, KIMI_K3_SEP),
    answer=_kimi_k3_open("response"),
)


# LongCat: pairs with its own tags, or JSON, depending on the checkpoint.

LONGCAT_PREFIX = "longcat_"
LONGCAT_OPENER, LONGCAT_CLOSER = f"<{LONGCAT_PREFIX}tool_call>", f"</{LONGCAT_PREFIX}tool_call>"
LONGCAT_THINK = f"<{LONGCAT_PREFIX}think>"

LONGCAT_TAGS = pairs((LONGCAT_OPENER, NAME, "\n"), LONGCAT_CLOSER, LONGCAT_PREFIX)
LONGCAT_KEY_TAG = _pair_tags(LONGCAT_TAGS)[0]

LONGCAT = ToolFormat(
    name="longcat",
    clues=(in_template(LONGCAT_OPENER),),
    openers=(LONGCAT_OPENER,),
    closers=(LONGCAT_CLOSER,),
    tokens=_pair_tags(LONGCAT_TAGS),
    readings=(Reading(JSON_CALLS, begins=("{", "["), end=LONGCAT_CLOSER), Reading(LONGCAT_TAGS)),
    frames=(
        Frame(
            LONGCAT_TAGS, LONGCAT_OPENER, separator=("\n",), needs=LONGCAT_KEY_TAG, is_block=False
        ),
        calls_between(LONGCAT_OPENER, LONGCAT_CLOSER, JSON_CALLS, lacks=LONGCAT_KEY_TAG),
    ),
)

LONGCAT_THOUGHT = ReasoningFormat(
    name="longcat_think",
    aliases=("longcat",),
    clues=(in_template(LONGCAT_THINK), as_tokens(LONGCAT_THINK)),
    starts=(LONGCAT_THINK,),
    ends=(f"</{LONGCAT_PREFIX}think>",),
)


# MiniCPM 5: `<function name="f"><param name="a">…</param></function>`.
#
# A value that contains markup is a CDATA section.

MINICPM5_OPENER, MINICPM5_CLOSER = "<function name=", "</function>"
# As tokenizers write it that drop blanks.
MINICPM5_GLUED = "<functionname="
MINICPM5_PARAMETER = "<param name="

MINICPM5_TAGS = Tags(
    call=(f'{MINICPM5_OPENER}"', NAME, '">', ARGUMENTS, MINICPM5_CLOSER),
    parameter=(f'{MINICPM5_PARAMETER}"', KEY, '">', VALUE, "</param>"),
    verbatim=("<![CDATA[", "]]>"),
    special="<&",
)

MINICPM5 = ToolFormat(
    name="minicpm5",
    clues=(in_template(f'{MINICPM5_OPENER}"', f'{MINICPM5_PARAMETER}"'),),
    openers=(MINICPM5_OPENER, MINICPM5_GLUED),
    closers=(MINICPM5_CLOSER,),
    readings=(Reading(MINICPM5_TAGS),),
    frames=(Frame(MINICPM5_TAGS, MINICPM5_OPENER, separator=("\n",), is_block=False),),
)


# MiniMax M2: `<invoke name="f"><parameter name="a">…</parameter></invoke>`.

MINIMAX_M2_OPENER, MINIMAX_M2_CLOSER = "<minimax:tool_call>", "</minimax:tool_call>"
MINIMAX_M2_INVOKE, MINIMAX_M2_INVOKE_END = '<invoke name="', "</invoke>"
MINIMAX_M2_PARAMETER = '<parameter name="'
# As other vendors write calls: without the family's block, or with theirs.
MINIMAX_M2_BARE = "<invoke"
_PLAIN_PREFIXES = ("", "antml:", "tml:")
PLAIN_OPENERS, PLAIN_ENDS = (
    tuple(f"<{slash}{prefix}function_calls>" for prefix in _PLAIN_PREFIXES) for slash in ("", "/")
)
# As this family, Qwen3-Coder's and those like them mix up their tags.
QWEN3_CODER_FUNCTION, QWEN3_CODER_FUNCTION_END = "<function=", "</function>"
QWEN3_CODER_PARAMETER, QWEN3_CODER_PARAMETER_END = "<parameter=", "</parameter>"
QWEN3_CODER_ARGUMENT = (QWEN3_CODER_PARAMETER, KEY, ">", VALUE, QWEN3_CODER_PARAMETER_END)
ELEMENT = ("<", KEY, ">", VALUE, "</", KEY, ">")

MINIMAX_M2_TAGS = Tags(
    call=(MINIMAX_M2_INVOKE, NAME, '">\n', ARGUMENTS, MINIMAX_M2_INVOKE_END),
    parameter=(MINIMAX_M2_PARAMETER, KEY, '">', VALUE, "</parameter>\n"),
    other_parameters=(QWEN3_CODER_ARGUMENT, ELEMENT),
    other_call_ends=(QWEN3_CODER_FUNCTION_END,),
)

# As models of other families write them.
PADDED_MINIMAX_M2_TAGS = replace(
    MINIMAX_M2_TAGS,
    parameter=(MINIMAX_M2_PARAMETER, KEY, '">\n', VALUE, "\n</parameter>\n"),
)

MINIMAX_M2 = ToolFormat(
    name="minimax_m2",
    aliases=("minimax",),
    clues=(in_template(MINIMAX_M2_OPENER),),
    openers=(MINIMAX_M2_OPENER, MINIMAX_M2_BARE, *PLAIN_OPENERS),
    closers=(MINIMAX_M2_CLOSER, *PLAIN_ENDS),
    readings=(
        Reading(MINIMAX_M2_TAGS, openers=(MINIMAX_M2_OPENER,), end=MINIMAX_M2_CLOSER),
        Reading(MINIMAX_M2_TAGS, openers=PLAIN_OPENERS, other_ends=PLAIN_ENDS),
        Reading(MINIMAX_M2_TAGS, openers=(MINIMAX_M2_BARE,), other_ends=(MINIMAX_M2_CLOSER,)),
    ),
    frames=(block_between(MINIMAX_M2_OPENER, MINIMAX_M2_CLOSER, MINIMAX_M2_TAGS),),
)


# Dots3 Note: `<invoke name="f"><parameter name="a">…</parameter></invoke>` on one line.

DOTS3_OPENER, DOTS3_CLOSER = "<dots_function_call>", "</dots_function_call>"

DOTS3_TAGS = Tags(
    call=(MINIMAX_M2_INVOKE, NAME, '">', ARGUMENTS, MINIMAX_M2_INVOKE_END),
    parameter=(MINIMAX_M2_PARAMETER, KEY, '">', VALUE, "</parameter>"),
    other_parameters=MINIMAX_M2_TAGS.other_parameters,
    other_call_ends=MINIMAX_M2_TAGS.other_call_ends,
)

DOTS3 = ToolFormat(
    name="dots3",
    aliases=("dots", "dots_note"),
    clues=(in_template(DOTS3_OPENER), as_tokens(DOTS3_OPENER)),
    # The block around the calls may be missing.
    openers=(DOTS3_OPENER, MINIMAX_M2_BARE),
    closers=(DOTS3_CLOSER,),
    # Served models also write JSON between the markers.
    readings=(
        Reading(JSON_CALLS, openers=(DOTS3_OPENER,), begins=("{", "["), end=DOTS3_CLOSER),
        Reading(DOTS3_TAGS, end=DOTS3_CLOSER),
    ),
    frames=(Frame(DOTS3_TAGS, DOTS3_OPENER, end=DOTS3_CLOSER),),
)


# MiniMax M3: a mark before each tag, so that no value looks like a tag.
#
# Arguments are elements named after themselves, and nested values are nested elements.

MINIMAX_M3_MARK = "]<]minimax[>["
MINIMAX_M3_OPENER, MINIMAX_M3_CLOSER = (
    f"{MINIMAX_M3_MARK}<tool_call>",
    f"{MINIMAX_M3_MARK}</tool_call>",
)
MINIMAX_M3_INVOKE = f"{MINIMAX_M3_MARK}<invoke"
MINIMAX_M3_THINK = "<mm:think>"

MINIMAX_M3_TAGS = Tags(
    call=(
        f"{MINIMAX_M3_MARK}{MINIMAX_M2_INVOKE}",
        NAME,
        '">',
        ARGUMENTS,
        f"{MINIMAX_M3_MARK}{MINIMAX_M2_INVOKE_END}",
    ),
    parameter=(f"{MINIMAX_M3_MARK}<", KEY, ">", VALUE, f"{MINIMAX_M3_MARK}</", KEY, ">"),
    requires_ends=True,
    mark=MINIMAX_M3_MARK,
    # In M2, argument names are attributes.
    misspelling=MINIMAX_M2_PARAMETER.removeprefix("<"),
)

MINIMAX_M3 = ToolFormat(
    name="minimax_m3",
    clues=(in_template(MINIMAX_M3_MARK),),
    openers=(MINIMAX_M3_OPENER, MINIMAX_M3_INVOKE, MINIMAX_M2_OPENER),
    closers=(MINIMAX_M3_CLOSER, MINIMAX_M2_CLOSER),
    tokens=(MINIMAX_M3_MARK,),
    readings=(
        Reading(MINIMAX_M3_TAGS, openers=(MINIMAX_M3_OPENER,), end=MINIMAX_M3_CLOSER),
        Reading(MINIMAX_M3_TAGS, openers=(MINIMAX_M3_INVOKE,), other_ends=(MINIMAX_M3_CLOSER,)),
        Reading(MINIMAX_M2_TAGS, openers=(MINIMAX_M2_OPENER,), end=MINIMAX_M2_CLOSER),
    ),
    frames=(block_between(MINIMAX_M3_OPENER, MINIMAX_M3_CLOSER, MINIMAX_M3_TAGS),),
)

MINIMAX_M3_THOUGHT = ReasoningFormat(
    name="mm_think",
    aliases=("minimax_m3",),
    clues=(in_template(MINIMAX_M3_THINK),),
    starts=(MINIMAX_M3_THINK,),
    ends=("</mm:think>",),
)


# Qwen3-Coder, Nemotron 3, Step 3.5: `<function=f><parameter=a>…</parameter></function>`.

QWEN3_CODER_OPENER, QWEN3_CODER_CLOSER = "<tool_call>", "</tool_call>"

QWEN3_CODER_TAGS = Tags(
    call=(QWEN3_CODER_FUNCTION, NAME, ">\n", ARGUMENTS, QWEN3_CODER_FUNCTION_END),
    parameter=(QWEN3_CODER_PARAMETER, KEY, ">\n", VALUE, f"\n{QWEN3_CODER_PARAMETER_END}\n"),
    other_parameters=(MINIMAX_M2_TAGS.parameter, ELEMENT),
    other_call_ends=(MINIMAX_M2_INVOKE_END,),
)

QWEN3_CODER = ToolFormat(
    name="qwen3_coder_xml",
    aliases=("qwen3_coder", "qwen3_xml", "nemotron_v3", "nemotron_3", "step3p5", "berrylm"),
    clues=(
        in_template(f"{QWEN3_CODER_OPENER}\n{QWEN3_CODER_FUNCTION}"),
        # Most templates contain the newline as an escape inside a string.
        in_template(rf"{QWEN3_CODER_OPENER}\n{QWEN3_CODER_FUNCTION}"),
    ),
    openers=(QWEN3_CODER_OPENER, QWEN3_CODER_FUNCTION),
    closers=(QWEN3_CODER_CLOSER,),
    # Small models sometimes write JSON between the markers.
    readings=(
        Reading(JSON_CALLS, begins=("{", "["), end=QWEN3_CODER_CLOSER),
        Reading(QWEN3_CODER_TAGS, end=QWEN3_CODER_CLOSER),
    ),
    # MiMo also writes calls as other vendors do.
    lapses=(
        Reading(
            PADDED_MINIMAX_M2_TAGS,
            openers=PLAIN_OPENERS,
            end=PLAIN_ENDS[0],
            other_ends=PLAIN_ENDS[1:],
        ),
    ),
    frames=(
        calls_between(QWEN3_CODER_OPENER, QWEN3_CODER_CLOSER, QWEN3_CODER_TAGS),
        Frame(
            QWEN3_CODER_TAGS, QWEN3_CODER_FUNCTION, separator=("\n",), is_block=False, is_lapse=True
        ),
    ),
)


# Seed-OSS: Qwen3-Coder's tags in its own block, without newlines around values.

SEED_OSS_OPENER, SEED_OSS_CLOSER = "<seed:tool_call>", "</seed:tool_call>"
SEED_OSS_THINK = "<seed:think>"
_SEED_OSS_REFLECTION, _SEED_OSS_REFLECTION_END = (
    "<seed:cot_budget_reflect>",
    "</seed:cot_budget_reflect>",
)

SEED_OSS_TAGS = Tags(
    call=QWEN3_CODER_TAGS.call,
    parameter=(QWEN3_CODER_PARAMETER, KEY, ">", VALUE, f"{QWEN3_CODER_PARAMETER_END}\n"),
    other_parameters=QWEN3_CODER_TAGS.other_parameters,
    other_call_ends=QWEN3_CODER_TAGS.other_call_ends,
)

SEED_OSS = ToolFormat(
    name="seed_oss",
    clues=(in_template(SEED_OSS_OPENER),),
    openers=(SEED_OSS_OPENER, QWEN3_CODER_FUNCTION),
    closers=(SEED_OSS_CLOSER,),
    readings=(Reading(SEED_OSS_TAGS, end=SEED_OSS_CLOSER),),
    frames=(calls_between(SEED_OSS_OPENER, SEED_OSS_CLOSER, SEED_OSS_TAGS),),
)

SEED_OSS_THOUGHT = ReasoningFormat(
    name="seed_think",
    aliases=("seed_oss",),
    clues=(in_template(SEED_OSS_THINK), as_tokens(SEED_OSS_THINK)),
    starts=(SEED_OSS_THINK,),
    ends=("</seed:think>",),
    notes=(_SEED_OSS_REFLECTION, _SEED_OSS_REFLECTION_END),
    parting=(
        f"\n{_SEED_OSS_REFLECTION}I have exhausted my token budget, and now I will start "
        f"answering the question.{_SEED_OSS_REFLECTION_END}\n"
    ),
)


# MiMo V2: the tags of Seed-OSS between the markers of Qwen3-Coder.

MIMO = replace(
    QWEN3_CODER,
    name="mimo",
    aliases=("mimo_v2",),
    clues=(),
    readings=(
        Reading(JSON_CALLS, begins=("{", "["), end=QWEN3_CODER_CLOSER),
        Reading(SEED_OSS_TAGS, end=QWEN3_CODER_CLOSER),
    ),
    frames=(
        calls_between(QWEN3_CODER_OPENER, QWEN3_CODER_CLOSER, SEED_OSS_TAGS),
        Frame(
            SEED_OSS_TAGS, QWEN3_CODER_FUNCTION, separator=("\n",), is_block=False, is_lapse=True
        ),
    ),
)


# Solar Open 2: a name and arguments between tokens, `<|tool_arg:start|>a<|tool_arg:value|>…`.

SOLAR_OPEN2_OPENER, SOLAR_OPEN2_CLOSER = "<|tool_call:start|>", "<|tool_call:end|>"
_SOLAR_OPEN2_KEY, _SOLAR_OPEN2_VALUE, _SOLAR_OPEN2_VALUE_END = (
    "<|tool_arg:start|>",
    "<|tool_arg:value|>",
    "<|tool_arg:end|>",
)

SOLAR_OPEN2_TAGS = Tags(
    call=(SOLAR_OPEN2_OPENER, NAME, "\n", ARGUMENTS, SOLAR_OPEN2_CLOSER),
    parameter=(_SOLAR_OPEN2_KEY, KEY, _SOLAR_OPEN2_VALUE, VALUE, f"{_SOLAR_OPEN2_VALUE_END}\n"),
)

SOLAR_OPEN2 = ToolFormat(
    name="solar_open2",
    clues=(in_template(SOLAR_OPEN2_OPENER), as_tokens(SOLAR_OPEN2_OPENER, SOLAR_OPEN2_CLOSER)),
    openers=(SOLAR_OPEN2_OPENER,),
    closers=(SOLAR_OPEN2_CLOSER,),
    tokens=(_SOLAR_OPEN2_KEY, _SOLAR_OPEN2_VALUE, _SOLAR_OPEN2_VALUE_END),
    readings=(Reading(SOLAR_OPEN2_TAGS),),
    frames=(Frame(SOLAR_OPEN2_TAGS, SOLAR_OPEN2_OPENER, separator=("\n",), is_block=False),),
)


# Step 3: tags of StepTML between markers in fullwidth bars.

STEP3_OPENER, STEP3_CLOSER = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
STEP3_BEGIN, STEP3_SEPARATOR, STEP3_END = (
    "<｜tool_call_begin｜>",
    "<｜tool_sep｜>",
    "<｜tool_call_end｜>",
)

STEP3_TAGS = Tags(
    call=(
        *(f'{STEP3_BEGIN}function{STEP3_SEPARATOR}<steptml:invoke name="', NAME, '">'),
        *(ARGUMENTS, f"</steptml:invoke>{STEP3_END}"),
    ),
    parameter=('<steptml:parameter name="', KEY, '">', VALUE, "</steptml:parameter>"),
)

STEP3 = ToolFormat(
    name="step3",
    clues=(Clue(anywhere=(STEP3_OPENER,)),),
    # The block around the calls may be missing.
    openers=(STEP3_OPENER, STEP3_BEGIN),
    closers=(STEP3_CLOSER,),
    tokens=(STEP3_SEPARATOR, STEP3_END),
    readings=(Reading(STEP3_TAGS, end=STEP3_CLOSER),),
    frames=(Frame(STEP3_TAGS, STEP3_OPENER, end=STEP3_CLOSER),),
)
