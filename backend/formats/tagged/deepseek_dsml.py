"""DeepSeek V3.2, V4, V4.1: `<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">`.

Versions differ in the name of the block and in the text between the mark and a tag's word. The
empty line before a block belongs to the block.
"""

from itertools import starmap

from backend.formats.dialects import Reading, Tags
from backend.formats.evidence import as_tokens, in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.template import ARGUMENTS, KEY, NAME, TYPE, VALUE

MARK = "｜DSML｜"
EMPTY_LINE = "\n\n"
_TYPES = dict.fromkeys(("object", "array", "number", "integer", "boolean", "null"), "false")


def _tags(between: str) -> Tags:
    begin, end = f"<{MARK}{between}", f"</{MARK}{between}"
    return Tags(
        call=(f'{begin}invoke name="', NAME, '">\n', ARGUMENTS, f"{end}invoke>"),
        parameter=(
            *(f'{begin}parameter name="', KEY, '" string="', TYPE, '">'),
            *(VALUE, f"{end}parameter>\n"),
        ),
        types={"string": "true", **_TYPES},
    )


def _reading(between: str, block: str) -> Reading:
    opener = f"<{MARK}{between}{block}>"
    return Reading(
        dialect=_tags(between),
        openers=(opener, EMPTY_LINE + opener),
        end=f"</{MARK}{between}{block}>",
        other_ends=ENDS,
    )


def _call_reading(between: str) -> Reading:
    """Return the reading of a call without a surrounding block."""
    return Reading(dialect=_tags(between), openers=(f"<{MARK}{between}invoke",), other_ends=ENDS)


BLOCKS = (("", "function_calls"), ("", "tool_calls"), (" ", "calls"), ("r:", "tool_calls"))
ENDS = tuple(f"</{MARK}{between}{block}>" for between, block in BLOCKS)
READINGS = tuple(starmap(_reading, BLOCKS))
CALL_READINGS = tuple(map(_call_reading, ("", " ", "r:")))


def _frame(reading: Reading) -> Frame:
    tags = reading.dialect
    return Frame(
        dialect=tags,
        opener=reading.openers[0],
        call=("\n", *tags.call),
        end=f"\n{reading.end}",
    )


FORMAT = ToolFormat(
    name="deepseek_dsml",
    aliases=("deepseek_v32", "deepseek_v4", "dsml"),
    clues=(in_template(MARK), as_tokens(MARK)),
    openers=(
        *(reading.openers[0] for reading in READINGS),
        *(reading.openers[1] for reading in READINGS),
        *(reading.openers[0] for reading in CALL_READINGS),
    ),
    closers=tuple(reading.end for reading in READINGS),
    tokens=(MARK,),
    readings=(*READINGS, *CALL_READINGS),
    grammar=CallGrammar(frames=tuple(map(_frame, READINGS[:3]))),
)
