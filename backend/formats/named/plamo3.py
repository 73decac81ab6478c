"""PLaMo 3: a name and JSON, each between markers that begin and end alike.

A marker is several tokens: `<|plamo:begin_`, its words, `:plamo|>`.
"""

from backend.formats.dialects import NamedJson, Reading
from backend.formats.evidence import as_tokens, in_template
from backend.formats.format import ReasoningFormat, ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.template import ARGUMENTS, NAME, Maybe

# The tokens at both ends of a marker.
BEGIN, END, MARKER_END = "<|plamo:begin_", "<|plamo:end_", ":plamo|>"


def _around(words: str) -> tuple[str, str]:
    """Return the markers before and after a part."""
    return f"{BEGIN}{words}{MARKER_END}", f"{END}{words}{MARKER_END}"


OPENER, CLOSER = _around("tool_requests")
CALL, CALL_END = _around("tool_request")
NAME_BEGIN, NAME_END = _around("tool_name")
ARGUMENTS_BEGIN, ARGUMENTS_END = _around("tool_arguments")
THINK, THINK_END = _around("think")
CONSTRAIN, MESSAGE = "<|plamo:constrain|>", "<|plamo:msg|>"
TURN_END = "<|plamo:tag|>"

CALLS = NamedJson(
    calls=(
        (
            *(CALL, NAME_BEGIN, NAME, NAME_END, ARGUMENTS_BEGIN),
            *(f"{CONSTRAIN}json{MESSAGE}", ARGUMENTS, ARGUMENTS_END, CALL_END),
        ),
        (
            *(CALL, NAME_BEGIN, NAME, NAME_END, ARGUMENTS_BEGIN),
            *(Maybe((MESSAGE,)), ARGUMENTS, ARGUMENTS_END, CALL_END),
        ),
    )
)

FORMAT = ToolFormat(
    name="plamo3",
    aliases=("plamo",),
    clues=(in_template(OPENER), in_template(BEGIN, "tool_request")),
    openers=(OPENER, CALL),
    closers=(CLOSER, CALL_END),
    leaks=(TURN_END,),
    tokens=(CONSTRAIN, MESSAGE, BEGIN, END, MARKER_END),
    readings=(Reading(dialect=CALLS, end=CLOSER),),
    grammar=CallGrammar(frames=(Frame(dialect=CALLS, opener=OPENER, end=CLOSER),)),
)

THOUGHT = ReasoningFormat(
    name="plamo_think",
    aliases=("plamo3", "plamo"),
    clues=(in_template(THINK), in_template(BEGIN, "think"), as_tokens(THINK)),
    starts=(THINK,),
    ends=(THINK_END,),
)
