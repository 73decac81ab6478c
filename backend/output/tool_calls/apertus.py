"""The wire of Apertus: a list in which the name of the tool is the key, `[{"f": {…}}]`."""

import re
from functools import partial

from backend.output.tool_calls.call_block import CallBlock, CallBlockCursor
from backend.output.tool_calls.headed_call import CallHead
from backend.output.tool_calls.markup import Tag

OPENER, CLOSER = "<|tools_prefix|>", "<|tools_suffix|>"

_BLOCK = CallBlock(
    call=CallHead(
        tags=(
            Tag(
                "",
                re.compile(r'\s*"(?P<name>[^"\\]+)"\s*:\s*'),
                ends=("{",),
                unfinished=re.compile(r'\s*(?:"[^"\\{]*(?:"\s*(?::\s*)?)?)?'),
            ),
        ),
    ),
    starts=("[",),
    call_start="{",
    call_end="}",
    ends=(CLOSER,),
    separators=(",",),
    fillers=("]",),
)

make_apertus = partial(CallBlockCursor, block=_BLOCK)
