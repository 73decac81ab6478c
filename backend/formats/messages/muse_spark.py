"""Muse: messages to recipients, and calls as `<atem:invoke name="f">…` in them.

The header distinguishes thoughts from text; the tags name the tool.
"""

from backend.formats.dialects import Messages, Reading, Tags
from backend.formats.evidence import in_template
from backend.formats.format import ReasoningFormat, ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.template import ARGUMENTS, KEY, NAME, VALUE

START, MESSAGE = "<|start|>", "<|message|>"
NEXT, END = "<|eom|>", "<|eot|>"
ASSISTANT, SELF, USER = "assistant", "self", "user"
OPENER, CLOSER = "<atem:function_calls>", "</atem:function_calls>"
INVOKE = "<atem:invoke"
TO_SELF, TO_USER = f" to={SELF}{MESSAGE}", f" to={USER}{MESSAGE}"

TAGS = Tags(
    call=(f'{INVOKE} name="', NAME, '">\n', ARGUMENTS, "</atem:invoke>"),
    parameter=('<atem:parameter name="', KEY, '">', VALUE, "</atem:parameter>\n"),
    requires_ends=True,
)
MESSAGES = Messages(
    start=START,
    message=MESSAGE,
    roles=(ASSISTANT, "tool", USER, "system"),
    self_name=SELF,
    people=frozenset({USER}),
    ends=(NEXT, END),
    last_ends=(END,),
    heads=(TO_SELF, TO_USER),
    answer=TO_USER,
    calls=Reading(dialect=TAGS, openers=(OPENER, INVOKE), end=CLOSER),
)
_CLUE = in_template(OPENER)

FORMAT = ToolFormat(
    name="muse_spark",
    aliases=("muse", "muse_glimmer"),
    clues=(_CLUE,),
    openers=(OPENER, INVOKE),
    closers=(CLOSER,),
    tokens=MESSAGES.tokens,
    readings=(Reading(dialect=MESSAGES),),
    grammar=CallGrammar(
        frames=(
            Frame(
                dialect=TAGS,
                opener=" to=",
                call=(
                    *(" to=", NAME, f"{MESSAGE}{OPENER}\n"),
                    *(*TAGS.call, f"\n{CLOSER}"),
                ),
                separator=(f"{NEXT}{START}{ASSISTANT}",),
            ),
        ),
        around=MESSAGES,
    ),
    owns_reply=True,
)

THOUGHT = ReasoningFormat(
    name="muse",
    aliases=("muse_spark", "muse_glimmer"),
    clues=(_CLUE,),
    starts=(TO_SELF,),
    ends=(NEXT,),
    frames=(f"{START}{ASSISTANT}", TO_USER),
    tokens=(START, MESSAGE),
    bridge=f"{START}{ASSISTANT}",
    answer=TO_USER,
)
