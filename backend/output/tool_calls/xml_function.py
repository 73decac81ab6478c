"""Calls as `<function=f><parameter=a>…</parameter></function>`: Qwen3-Coder and its relatives.

A newline at each end of a value belongs to the tags, but for Seed-OSS. The block around the
calls may be missing.
"""

import re
from dataclasses import replace
from functools import partial

from backend.output.tool_calls.choice import ChoiceCursor
from backend.output.tool_calls.json_block import JsonBlockCursor
from backend.output.tool_calls.markup import Tag
from backend.output.tool_calls.tagged import TaggedCursor, TaggedDialect
from backend.output.tool_calls.wire import WireContext, WireCursor

OPENERS = ("<tool_call>", "<function=")
CLOSER = "</tool_call>"
SEED_OPENER, SEED_CLOSER = "<seed:tool_call>", "</seed:tool_call>"

_NAME = re.compile(r"\s*(?P<name>[^<>\s]+)\s*")

DIALECT = TaggedDialect(
    call=Tag("<function=", _NAME),
    call_end="</function>",
    parameter=Tag("<parameter=", _NAME),
    parameter_end="</parameter>",
    block_end=CLOSER,
    pads_values=True,
)
SEED = replace(DIALECT, block_end=SEED_CLOSER, pads_values=False)


def make_xml_function(context: WireContext) -> WireCursor:
    """Read tags; small models write JSON between the markers now and then."""
    read_json = partial(JsonBlockCursor, closer=CLOSER)
    read_tags = partial(TaggedCursor, dialect=DIALECT)
    return ChoiceCursor(context, choices={"{": read_json, "[": read_json}, otherwise=read_tags)


def make_json_or_xml(context: WireContext) -> WireCursor:
    """Read JSON; models that learnt both wires write tags between the markers now and then."""
    read_json = partial(JsonBlockCursor, closer=CLOSER)
    read_tags = partial(TaggedCursor, dialect=DIALECT)
    return ChoiceCursor(context, choices={"<function=": read_tags}, otherwise=read_json)


make_seed = partial(TaggedCursor, dialect=SEED)
