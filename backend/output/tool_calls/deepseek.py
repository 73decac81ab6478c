"""The wires of DeepSeek up to V3.2-Exp, with markers in fullwidth bars.

V3 and R1 write the type of the call, its name and JSON in a fence; V3.1 writes name and JSON.
Both wires are read for either: distilled models mix them up.
"""

import re
from functools import partial

from backend.output.tool_calls.call_block import CallBlock, CallBlockCursor
from backend.output.tool_calls.headed_call import CallHead
from backend.output.tool_calls.markup import Tag

CALL, SEPARATOR, CALL_END = (
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)
# The block around the calls may be missing.
OPENERS = ("<｜tool▁calls▁begin｜>", CALL)
CLOSERS = ("<｜tool▁calls▁end｜>",)

_FENCE = "```"
_NAME = re.compile(r"\s*(?P<name>[^\s<{`]+)\s*")

_BLOCK = CallBlock(
    call=CallHead(
        tags=(
            Tag(
                f"function{SEPARATOR}",
                _NAME,
                ends=("\n", "{", _FENCE),
                unfinished=re.compile(r"[ \t]*[^\s<{`]*[ \t]*`{0,2}"),
            ),
            Tag(
                "",
                _NAME,
                ends=(SEPARATOR, "{"),
                unfinished=re.compile(r"\s*[^\s<{`]*\s*(?:<[｜▁\w]*)?"),
            ),
        ),
        lead_in=f"{_FENCE}json",
    ),
    call_start=CALL,
    call_end=CALL_END,
    ends=CLOSERS,
    fillers=(_FENCE,),
)

make_deepseek = partial(CallBlockCursor, block=_BLOCK)
