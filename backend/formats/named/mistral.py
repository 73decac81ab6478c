"""Mistral: `[TOOL_CALLS]` and a JSON list, or a name and its arguments.

Tokenizers up to v7 use the list, `[{"name": …, "arguments": {…}, "id": …}]`; from v11 on they
use `f[CALL_ID]…[ARGS]{…}` and `f[ARGS]{…}`, each call after its own marker.
"""

from backend.formats.dialects import NamedJson, Objects, Reading
from backend.formats.evidence import Clue, as_tokens
from backend.formats.format import ReasoningFormat, ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.template import (
    ARGUMENTS,
    MAYBE_SPACE,
    NAME,
    QUOTED_NAME,
    Characters,
    Id,
    Maybe,
)

OPENER, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
THINK, THINK_END = "[THINK]", "[/THINK]"
ID_CHARS = 9

_ID = Id((Characters(f"[a-zA-Z0-9]{{{ID_CHARS}}}"),))
HEADS = NamedJson(calls=((OPENER, NAME, Maybe((CALL_ID, _ID)), ARGS, ARGUMENTS),))
LIST = Objects(
    (
        *('{"name": ', QUOTED_NAME, ', "arguments": ', ARGUMENTS),
        *(Maybe((', "id": "', _ID, '"')), "}"),
    )
)

FORMAT = ToolFormat(
    name="mistral",
    aliases=("mistral_v11", "magistral"),
    clues=(Clue(anywhere=(OPENER,)),),
    openers=(OPENER,),
    tokens=(CALL_ID, ARGS),
    readings=(
        Reading(dialect=LIST, begins=("[", "{")),
        Reading(dialect=HEADS),
    ),
    grammar=CallGrammar(
        frames=(
            Frame(dialect=HEADS, opener=OPENER, needs=ARGS, is_block=False),
            Frame(
                dialect=LIST,
                opener=OPENER,
                begin=(MAYBE_SPACE, "["),
                separator=(", ",),
                end="]",
                lacks=ARGS,
            ),
        ),
    ),
    id_chars=ID_CHARS,
)

THOUGHT = ReasoningFormat(
    name="mistral_think",
    aliases=("mistral", "magistral", "ministral"),
    clues=(as_tokens(THINK, THINK_END),),
    starts=(THINK,),
    ends=(THINK_END,),
)
