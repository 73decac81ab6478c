"""Formats whose replies are messages with a channel or a recipient."""

from backend.formats.dialects import (
    ARGUMENTS,
    KEY,
    MAYBE_SPACE,
    NAME,
    VALUE,
    Maybe,
    Messages,
    NamedJson,
    Reading,
    Tags,
)
from backend.formats.format import Frame, ReasoningFormat, ToolFormat, as_tokens, in_template

# gpt-oss: messages on channels, `<|channel|>final<|message|>…<|return|>`.
#
# A message with a recipient is a call on any channel. The recipient may come before or after the
# channel. Commentary without a recipient is a preamble: text for the user.

HARMONY_START, HARMONY_MESSAGE = "<|start|>", "<|message|>"
HARMONY_CHANNEL, HARMONY_CONSTRAIN = "<|channel|>", "<|constrain|>"
HARMONY_END, HARMONY_CALL, HARMONY_RETURN = "<|end|>", "<|call|>", "<|return|>"
HARMONY_ANALYSIS, HARMONY_COMMENTARY, HARMONY_FINAL = "analysis", "commentary", "final"
HARMONY_ASSISTANT, HARMONY_NAMESPACE, HARMONY_JSON = "assistant", "functions.", "json"


def _harmony_head(channel: str) -> str:
    return f"{HARMONY_CHANNEL}{channel}{HARMONY_MESSAGE}"


HARMONY_MESSAGES = Messages(
    start=HARMONY_START,
    message=HARMONY_MESSAGE,
    channel=HARMONY_CHANNEL,
    constrain=HARMONY_CONSTRAIN,
    channels={HARMONY_ANALYSIS: True, HARMONY_COMMENTARY: False, HARMONY_FINAL: False},
    roles=(HARMONY_ASSISTANT, HARMONY_NAMESPACE, "tool", "user", "system", "developer"),
    people=frozenset({HARMONY_ASSISTANT, "user", "all"}),
    namespace=HARMONY_NAMESPACE,
    words=frozenset({HARMONY_JSON, "code"}),
    ends=(HARMONY_END, HARMONY_CALL, HARMONY_RETURN),
    last_ends=(HARMONY_CALL, HARMONY_RETURN),
    heads=(_harmony_head(HARMONY_ANALYSIS), _harmony_head(HARMONY_COMMENTARY)),
    answer=_harmony_head(HARMONY_FINAL),
)
_HARMONY_TO = f" to={HARMONY_NAMESPACE}"
_HARMONY_AFTER_CHANNEL = f"{HARMONY_CHANNEL}{HARMONY_COMMENTARY}{_HARMONY_TO}"
HARMONY_CALLS = NamedJson(
    calls=(
        (
            _HARMONY_AFTER_CHANNEL,
            NAME,
            MAYBE_SPACE,
            f"{HARMONY_CONSTRAIN}{HARMONY_JSON}{HARMONY_MESSAGE}",
            ARGUMENTS,
        ),
        (
            *(_HARMONY_TO, NAME, f"{HARMONY_CHANNEL}{HARMONY_COMMENTARY} "),
            *(Maybe((HARMONY_CONSTRAIN,)), f"{HARMONY_JSON}{HARMONY_MESSAGE}", ARGUMENTS),
        ),
    )
)
_HARMONY_CLUE = as_tokens(HARMONY_CHANNEL, HARMONY_CALL, HARMONY_CONSTRAIN)

HARMONY = ToolFormat(
    name="harmony",
    aliases=("gpt_oss", "openai"),
    clues=(_HARMONY_CLUE,),
    closers=(HARMONY_CALL,),
    tokens=HARMONY_MESSAGES.tokens,
    readings=(Reading(HARMONY_MESSAGES),),
    frames=(
        Frame(HARMONY_CALLS, _HARMONY_AFTER_CHANNEL, call=HARMONY_CALLS.calls[0], end=HARMONY_CALL),
        Frame(HARMONY_CALLS, _HARMONY_TO, call=HARMONY_CALLS.calls[1], end=HARMONY_CALL),
    ),
    most_calls=1,
    around=HARMONY_MESSAGES,
    owns_reply=True,
)

HARMONY_THOUGHT = ReasoningFormat(
    name="harmony",
    aliases=("gpt_oss", "openai_gptoss"),
    clues=(_HARMONY_CLUE,),
    starts=(_harmony_head(HARMONY_ANALYSIS),),
    ends=(HARMONY_END,),
    frames=(
        f"{HARMONY_START}{HARMONY_ASSISTANT}",
        _harmony_head(HARMONY_FINAL),
        _harmony_head(HARMONY_COMMENTARY),
        HARMONY_RETURN,
    ),
    tokens=(HARMONY_START, HARMONY_CHANNEL, HARMONY_MESSAGE),
    bridge=f"{HARMONY_START}{HARMONY_ASSISTANT}",
    answer=_harmony_head(HARMONY_FINAL),
)


# Muse: messages to recipients, and calls as `<atem:invoke name="f">…` in them.
#
# The header distinguishes thoughts from text; the tags name the tool.

MUSE_SPARK_START, MUSE_SPARK_MESSAGE = "<|start|>", "<|message|>"
MUSE_SPARK_NEXT, MUSE_SPARK_END = "<|eom|>", "<|eot|>"
MUSE_SPARK_ASSISTANT, MUSE_SPARK_SELF, MUSE_SPARK_USER = "assistant", "self", "user"
MUSE_SPARK_OPENER, MUSE_SPARK_CLOSER = "<atem:function_calls>", "</atem:function_calls>"
MUSE_SPARK_INVOKE = "<atem:invoke"
# Tags without their mark.
MUSE_SPARK_PLAIN = ("<function_calls>", "<invoke")
MUSE_SPARK_TO_SELF, MUSE_SPARK_TO_USER = (
    f" to={MUSE_SPARK_SELF}{MUSE_SPARK_MESSAGE}",
    f" to={MUSE_SPARK_USER}{MUSE_SPARK_MESSAGE}",
)

MUSE_SPARK_TAGS = Tags(
    call=(f'{MUSE_SPARK_INVOKE} name="', NAME, '">\n', ARGUMENTS, "</atem:invoke>"),
    parameter=('<atem:parameter name="', KEY, '">', VALUE, "</atem:parameter>\n"),
    requires_ends=True,
)
MUSE_SPARK_MESSAGES = Messages(
    start=MUSE_SPARK_START,
    message=MUSE_SPARK_MESSAGE,
    roles=(MUSE_SPARK_ASSISTANT, "tool", MUSE_SPARK_USER, "system"),
    self_name=MUSE_SPARK_SELF,
    people=frozenset({MUSE_SPARK_USER}),
    ends=(MUSE_SPARK_NEXT, MUSE_SPARK_END),
    last_ends=(MUSE_SPARK_END,),
    heads=(MUSE_SPARK_TO_SELF, MUSE_SPARK_TO_USER),
    answer=MUSE_SPARK_TO_USER,
    calls=Reading(
        MUSE_SPARK_TAGS,
        openers=(MUSE_SPARK_OPENER, MUSE_SPARK_INVOKE, *MUSE_SPARK_PLAIN),
        end=MUSE_SPARK_CLOSER,
        other_ends=("</function_calls>",),
    ),
)
_MUSE_SPARK_CLUE = in_template(MUSE_SPARK_OPENER)

MUSE_SPARK = ToolFormat(
    name="muse_spark",
    aliases=("muse", "muse_glimmer"),
    clues=(_MUSE_SPARK_CLUE,),
    openers=(MUSE_SPARK_OPENER, MUSE_SPARK_INVOKE, *MUSE_SPARK_PLAIN),
    closers=(MUSE_SPARK_CLOSER,),
    tokens=MUSE_SPARK_MESSAGES.tokens,
    readings=(Reading(MUSE_SPARK_MESSAGES),),
    frames=(
        Frame(
            MUSE_SPARK_TAGS,
            " to=",
            call=(
                *(" to=", NAME, f"{MUSE_SPARK_MESSAGE}{MUSE_SPARK_OPENER}\n"),
                *(*MUSE_SPARK_TAGS.call, f"\n{MUSE_SPARK_CLOSER}"),
            ),
            separator=(f"{MUSE_SPARK_NEXT}{MUSE_SPARK_START}{MUSE_SPARK_ASSISTANT}",),
        ),
    ),
    around=MUSE_SPARK_MESSAGES,
    owns_reply=True,
)

MUSE_SPARK_THOUGHT = ReasoningFormat(
    name="muse",
    aliases=("muse_spark", "muse_glimmer"),
    clues=(_MUSE_SPARK_CLUE,),
    starts=(MUSE_SPARK_TO_SELF,),
    ends=(MUSE_SPARK_NEXT,),
    frames=(f"{MUSE_SPARK_START}{MUSE_SPARK_ASSISTANT}", MUSE_SPARK_TO_USER),
    tokens=(MUSE_SPARK_START, MUSE_SPARK_MESSAGE),
    bridge=f"{MUSE_SPARK_START}{MUSE_SPARK_ASSISTANT}",
    answer=MUSE_SPARK_TO_USER,
)
