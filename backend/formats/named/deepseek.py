"""DeepSeek up to V3.2-Exp: markers in fullwidth bars.

V3 and R1 write the call's type, its name, and JSON in a fence; V3.1 writes name and JSON.
Both are read for either: distilled models mix them up.
"""

from backend.formats.dialects import NamedJson, Reading
from backend.formats.evidence import Clue
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.template import ARGUMENTS, NAME

OPENER, CLOSER = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

PLAIN = (BEGIN, NAME, SEPARATOR, ARGUMENTS, END)
FENCED = (BEGIN, f"function{SEPARATOR}", NAME, "\n```json\n", ARGUMENTS, "\n```", END)


def deepseek_format(
    name: str,
    calls: NamedJson,
    *,
    clue: Clue,
    separator: str = "",
    aliases: tuple[str, ...] = (),
) -> ToolFormat:
    """Return the format of one DeepSeek generation.

    Args:
        name: Name of the format.
        calls: Both ways to write a call, this generation's own first.
        clue: Identifies the generation.
        separator: The text between two calls.
        aliases: Names used by hosts.
    """
    between = (separator,) if separator else ()
    frame = Frame(dialect=calls, opener=OPENER, separator=between, end=CLOSER)
    return ToolFormat(
        name=name,
        aliases=aliases,
        clues=(clue,),
        # The block around the calls may be missing.
        openers=(OPENER, BEGIN),
        closers=(CLOSER,),
        tokens=(SEPARATOR, END),
        readings=(Reading(dialect=calls, end=CLOSER),),
        grammar=CallGrammar(frames=(frame,)),
    )
