"""The wire of Kimi K2: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}`.

The id is the wire's own, and later turns refer to it: it is kept.
"""

import re
from functools import partial

from backend.output.tool_calls.call_block import CallBlock, CallBlockCursor
from backend.output.tool_calls.headed_call import CallHead
from backend.output.tool_calls.markup import Tag

CALL, ARGUMENTS, CALL_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
# The section around the calls may be missing, and some models write it in the singular.
OPENERS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", CALL)
CLOSERS = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")

_UNFINISHED = re.compile(r"\s*[^\s<{]*\s*(?:<[|\w]*)?")
_ENDS = (ARGUMENTS, "{")

_BLOCK = CallBlock(
    call=CallHead(
        tags=(
            Tag(
                "",
                re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<{]+):\d+)\s*"),
                ends=_ENDS,
                unfinished=_UNFINISHED,
            ),
            Tag(
                "",
                re.compile(r"\s*(?:functions\.)?(?P<name>[^\s<{]+)\s*"),
                ends=_ENDS,
                unfinished=_UNFINISHED,
            ),
        ),
    ),
    call_start=CALL,
    call_end=CALL_END,
    ends=CLOSERS,
)

make_kimi_k2 = partial(CallBlockCursor, block=_BLOCK)
