"""Kimi K3: tags between special tokens, `<|open|>call tool="f" index="1"<|sep|>…`.

Argument tags carry types. Some calls have all arguments as one JSON object.
"""

from backend.formats.dialects import Reading, Tags
from backend.formats.evidence import as_tokens
from backend.formats.format import ReasoningFormat, ToolFormat
from backend.formats.grammar import CallGrammar, Frame, Section
from backend.formats.template import ARGUMENTS, INDEX, KEY, NAME, TYPE, VALUE

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
MESSAGE_END = "<|end_of_msg|>"
_TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")


def _open(name: str) -> str:
    return f"{OPEN}{name}{SEP}"


def _close(name: str) -> str:
    return f"{CLOSE}{name}{SEP}"


OPENER, CLOSER = _open("tools"), _close("tools")

TAGS = Tags(
    call=(
        *(f'{OPEN}call tool="', NAME, '" index="', INDEX, f'"{SEP}'),
        *(ARGUMENTS, _close("call")),
    ),
    parameter=(
        *(f'{OPEN}argument key="', KEY, '" type="', TYPE, f'"{SEP}'),
        *(VALUE, _close("argument")),
    ),
    types={name: name for name in _TYPES} | {"integer": "number"},
    requires_ends=True,
    escapes_attributes=True,
    object=(f'{OPEN}json type="', TYPE, f'"{SEP}', ARGUMENTS, _close("json")),
)
_CLUE = as_tokens(OPEN, CLOSE, SEP, MESSAGE_END)

FORMAT = ToolFormat(
    name="kimi_k3",
    clues=(_CLUE,),
    openers=(OPENER,),
    closers=(CLOSER,),
    tokens=(OPEN, CLOSE, SEP),
    readings=(Reading(dialect=TAGS, end=CLOSER),),
    grammar=CallGrammar(
        frames=(
            Frame(dialect=TAGS, opener=OPENER, end=f"{CLOSER}{_close('message')}{MESSAGE_END}"),
        ),
        around=Section(
            begin=_open("response"), end=_close("response"), may_be_open=True, closes=True
        ),
    ),
    is_quotable=False,
)

THOUGHT = ReasoningFormat(
    name="xtml_think",
    aliases=("kimi_k3",),
    clues=(_CLUE,),
    starts=(_open("think"),),
    # The start of an answer ends a thought that was not closed.
    ends=(_close("think"), _open("response")),
    frames=(_close("response"), _close("message"), MESSAGE_END),
    tokens=(OPEN, CLOSE, SEP),
    answer=_open("response"),
)
