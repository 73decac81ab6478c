"""The wire of Functionary v3.2: `>>>f` and JSON on the next line, or `>>>all` and text.

The prompt ends with the first `>>>`, so the reply begins with a recipient.
"""

import re
from functools import partial

from backend.output.tool_calls.call_block import CallBlock, CallBlockCursor
from backend.output.tool_calls.choice import ChoiceCursor
from backend.output.tool_calls.headed_call import CallHead
from backend.output.tool_calls.markup import Tag
from backend.output.tool_calls.named_function import OPENER as TAG_OPENER
from backend.output.tool_calls.named_function import make_named_function
from backend.output.tool_calls.wire import WireContext, WireCursor, WireOutput

_OPENER = ">>>"
OPENERS = (_OPENER, TAG_OPENER)

_TO_ALL = "all\n"

_BLOCK = CallBlock(
    call=CallHead(
        tags=(
            Tag(
                "",
                re.compile(r"(?P<name>[^\s<>{]+)[ \t]*\n\s*"),
                ends=("{",),
                unfinished=re.compile(r"[^\s<>{]*[ \t]*(?:\n\s*)?"),
            ),
        ),
    ),
)


class MarkupCursor:
    """Takes one text that means nothing, and ends."""

    held = ""
    is_mid_call = False

    def __init__(self, _context: WireContext, *, markup: str) -> None:
        self._markup = markup

    def feed(self, text: str) -> WireOutput:
        """Give back all that follows the text."""
        return WireOutput(rest=text.lstrip().removeprefix(self._markup))

    def finish(self, *, truncated: bool) -> WireOutput:
        """End, before the text came."""
        return WireOutput(rejected="" if truncated else self.held)


def make_functionary(context: WireContext) -> WireCursor:
    """Read one recipient, and what is written to it if that is a tool."""
    if context.opener == TAG_OPENER:
        return make_named_function(context)
    read_call = partial(CallBlockCursor, block=_BLOCK)
    choices = {_TO_ALL: partial(MarkupCursor, markup=_TO_ALL)}
    if not context.opener:
        # Not every prompt ends as it should: then the router meets the opener.
        choices[_OPENER] = partial(MarkupCursor, markup="")
    return ChoiceCursor(context, choices=choices, otherwise=read_call)
