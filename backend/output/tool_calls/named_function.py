"""Calls as a name in a tag and JSON behind it, `<function=f>{…}</function>`.

Llama models learnt it from one of Meta's prompts, and so did Functionary v3.1.
"""

import re
from functools import partial

from backend.output.tool_calls.call_block import CallBlock, CallBlockCursor
from backend.output.tool_calls.headed_call import CallHead
from backend.output.tool_calls.json_block import JsonBlockCursor
from backend.output.tool_calls.markup import Tag
from backend.output.tool_calls.wire import WireContext, WireCursor

OPENER, CLOSER = "<function=", "</function>"

_BLOCK = CallBlock(
    call=CallHead(
        tags=(
            Tag(
                "",
                re.compile(r"\s*(?P<name>[^\s<>{]+)\s*"),
                ends=(">",),
                unfinished=re.compile(r"\s*[^\s<>{]*\s*"),
            ),
        ),
    ),
    call_start=OPENER,
    call_end=CLOSER,
)

make_named_function = partial(CallBlockCursor, block=_BLOCK)


def make_json_or_named(context: WireContext) -> WireCursor:
    """Read the wire that the opener begins: JSON, unless it is a tag."""
    return (make_named_function if context.opener == OPENER else JsonBlockCursor)(context)
