"""gpt-oss: messages on channels, `<|channel|>final<|message|>…<|return|>`.

A message with a recipient is a call on any channel. The recipient may come before or after the
channel. Commentary without a recipient is a preamble: text for the user.
"""

from backend.formats.dialects import Messages, NamedJson, Reading
from backend.formats.evidence import as_tokens
from backend.formats.format import ReasoningFormat, ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.template import ARGUMENTS, MAYBE_SPACE, NAME, Maybe

START, MESSAGE = "<|start|>", "<|message|>"
CHANNEL, CONSTRAIN = "<|channel|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
ASSISTANT, NAMESPACE, JSON = "assistant", "functions.", "json"


def _head(channel: str) -> str:
    return f"{CHANNEL}{channel}{MESSAGE}"


MESSAGES = Messages(
    start=START,
    message=MESSAGE,
    channel=CHANNEL,
    constrain=CONSTRAIN,
    channels={ANALYSIS: True, COMMENTARY: False, FINAL: False},
    roles=(ASSISTANT, NAMESPACE, "tool", "user", "system", "developer"),
    people=frozenset({ASSISTANT, "user", "all"}),
    namespace=NAMESPACE,
    words=frozenset({JSON, "code"}),
    ends=(END, CALL, RETURN),
    last_ends=(CALL, RETURN),
    heads=(_head(ANALYSIS), _head(COMMENTARY)),
    answer=_head(FINAL),
)
_TO = f" to={NAMESPACE}"
_AFTER_CHANNEL = f"{CHANNEL}{COMMENTARY}{_TO}"
CALLS = NamedJson(
    calls=(
        (_AFTER_CHANNEL, NAME, MAYBE_SPACE, f"{CONSTRAIN}{JSON}{MESSAGE}", ARGUMENTS),
        (
            *(_TO, NAME, f"{CHANNEL}{COMMENTARY} ", Maybe((CONSTRAIN,))),
            *(f"{JSON}{MESSAGE}", ARGUMENTS),
        ),
    )
)
_CLUE = as_tokens(CHANNEL, CALL, CONSTRAIN)

FORMAT = ToolFormat(
    name="harmony",
    aliases=("gpt_oss", "openai"),
    clues=(_CLUE,),
    closers=(CALL,),
    tokens=MESSAGES.tokens,
    readings=(Reading(dialect=MESSAGES),),
    grammar=CallGrammar(
        frames=(
            Frame(dialect=CALLS, opener=_AFTER_CHANNEL, call=CALLS.calls[0], end=CALL),
            Frame(dialect=CALLS, opener=_TO, call=CALLS.calls[1], end=CALL),
        ),
        most_calls=1,
        around=MESSAGES,
    ),
    owns_reply=True,
)

THOUGHT = ReasoningFormat(
    name="harmony",
    aliases=("gpt_oss", "openai_gptoss"),
    clues=(_CLUE,),
    starts=(_head(ANALYSIS),),
    ends=(END,),
    frames=(
        f"{START}{ASSISTANT}",
        _head(FINAL),
        _head(COMMENTARY),
        RETURN,
    ),
    tokens=(START, CHANNEL, MESSAGE),
    bridge=f"{START}{ASSISTANT}",
    answer=_head(FINAL),
)
