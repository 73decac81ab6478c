"""GigaChat 3 and 3.1: one object after a dedicated role or a token."""

from backend.formats.dialects import JSON_CALLS, Reading
from backend.formats.evidence import in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame

MARKER = "<|function_call|>"
SEPARATOR, ROLE_END = "<|message_sep|>", "<|role_sep|>"
ROLE = f"function call{ROLE_END}"

FORMAT = ToolFormat(
    name="gigachat3",
    aliases=("gigachat", "gigachat31"),
    clues=(in_template(ROLE), in_template(MARKER)),
    openers=(MARKER, f"{SEPARATOR}\n\n{ROLE}", ROLE),
    tokens=(SEPARATOR, ROLE_END),
    leaks=(SEPARATOR,),
    readings=(Reading(dialect=JSON_CALLS),),
    grammar=CallGrammar(
        frames=(
            Frame(dialect=JSON_CALLS, opener=MARKER, needs=MARKER),
            Frame(dialect=JSON_CALLS, opener=ROLE, begin=("\n",), lacks=MARKER),
        ),
        most_calls=1,
    ),
)
