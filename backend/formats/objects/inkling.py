"""Inkling: typed blocks, `<|content_invoke_tool_json|>{"name":…,"args":{…}}`."""

from backend.formats.dialects import Objects, Reading
from backend.formats.evidence import as_tokens
from backend.formats.format import ReasoningFormat, ToolFormat
from backend.formats.grammar import CallGrammar, Frame, Section
from backend.formats.template import ARGUMENTS, QUOTED_NAME

MESSAGE, END, LAST_END = "<|message_model|>", "<|end_message|>", "<|content_model_end_sampling|>"
OPENER = "<|content_invoke_tool_json|>"
THINKING, TEXT = "<|content_thinking|>", "<|content_text|>"

CALLS = Objects(('{"name": ', QUOTED_NAME, ', "args": ', ARGUMENTS, "}"))
_CLUE = as_tokens(OPENER, MESSAGE)

FORMAT = ToolFormat(
    name="inkling",
    clues=(_CLUE,),
    openers=(OPENER,),
    tokens=(MESSAGE, END),
    leaks=(MESSAGE, END, LAST_END),
    readings=(Reading(dialect=CALLS, end=END),),
    grammar=CallGrammar(
        frames=(
            Frame(
                dialect=CALLS,
                opener=OPENER,
                separator=(f"{END}{MESSAGE}{OPENER}",),
                end=END,
            ),
        ),
        around=Section(begin=TEXT, end=f"{END}{MESSAGE}", may_be_open=True),
    ),
)

THOUGHT = ReasoningFormat(
    name="inkling_thinking",
    aliases=("inkling",),
    clues=(_CLUE,),
    starts=(THINKING,),
    ends=(END,),
    frames=(MESSAGE, TEXT, LAST_END),
    bridge=MESSAGE,
    answer=TEXT,
)
