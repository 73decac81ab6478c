"""The wires of Mistral behind `[TOOL_CALLS]`: a JSON list, or a name and its arguments.

Tokenizers up to v7 come with the list, `[{"name": …, "arguments": {…}, "id": …}]`, those from
v11 on with `f[CALL_ID]…[ARGS]{…}` and `f[ARGS]{…}`, each call behind a marker of its own.
"""

import re
import secrets
import string
from functools import partial

from backend.output.tool_calls.call_block import CallBlock, CallBlockCursor
from backend.output.tool_calls.choice import ChoiceCursor
from backend.output.tool_calls.headed_call import CallHead
from backend.output.tool_calls.json_block import JsonBlockCursor
from backend.output.tool_calls.json_call import CallKeys
from backend.output.tool_calls.markup import Tag
from backend.output.tool_calls.wire import WireContext, WireCursor

OPENER, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_ID_ALPHABET = string.ascii_letters + string.digits
_ID_CHARS = 9

# Decoders that drop special tokens leave a name that its arguments follow at once.
_BLOCK = CallBlock(
    call=CallHead(
        tags=(
            Tag(
                "",
                re.compile(
                    r"\s*(?P<name>[^\s\[{]+)\s*(?:\[CALL_ID\]\s*(?P<id>[^\s\[{]+)\s*)?",
                ),
                ends=(ARGUMENTS, "{"),
                unfinished=re.compile(
                    r"\s*[^\s\[{]*\s*(?:\[[A-Z_]*|\[CALL_ID\]\s*[^\s\[{]*\s*(?:\[[A-Z]*)?)?"
                ),
            ),
        ),
    ),
    call_start=OPENER,
)


def new_mistral_id() -> str:
    """Return an id of the only kind that the family's templates take."""
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_CHARS))


def make_mistral(context: WireContext) -> WireCursor:
    """Read whichever wire begins behind the marker."""
    read_list = partial(JsonBlockCursor, keys=CallKeys(ids=("id",)))
    read_heads = partial(CallBlockCursor, block=_BLOCK)
    return ChoiceCursor(context, choices={"[": read_list, "{": read_list}, otherwise=read_heads)
