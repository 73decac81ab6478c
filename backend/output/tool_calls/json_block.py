"""Calls as JSON objects, between markers, in a list, or bare: `{"name": …, "arguments": {…}}`.

The wire of Hermes and Qwen, and with other markers and keys that of many more. Several objects
are taken for several calls, be they a list or one behind the other. Braces doubled as in a
template and a fence around the JSON mean nothing.
"""

from backend.output.tool_calls.call_block import CallBlock, CallBlockCursor
from backend.output.tool_calls.json_call import CALL_KEYS, CallKeys
from backend.output.tool_calls.wire import WireContext


class JsonBlockCursor(CallBlockCursor):
    """Reads one block, at whose end stands `closer`, if anything does."""

    def __init__(
        self, context: WireContext, *, closer: str = "", keys: CallKeys = CALL_KEYS
    ) -> None:
        block = CallBlock(
            call=keys,
            call_start="{",
            starts=("[", "```json"),
            ends=(closer,) if closer else (),
            separators=(",", ";"),
            fillers=("]", "}", "```"),
        )
        super().__init__(context, block=block)
