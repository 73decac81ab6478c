"""Calls as a name and pairs, `<tool_call>f<arg_key>a</arg_key><arg_value>…</arg_value>…`.

The wire of GLM, with newlines between the tags (4.5, 4.6) or without (4.7 and later).
"""

import re
from functools import partial

from backend.output.tool_calls.choice import ChoiceCursor
from backend.output.tool_calls.json_block import JsonBlockCursor
from backend.output.tool_calls.markup import Tag
from backend.output.tool_calls.tagged import TaggedCursor, TaggedDialect
from backend.output.tool_calls.wire import WireContext, WireCursor

OPENER, CLOSER = "<tool_call>", "</tool_call>"

DIALECT = TaggedDialect(
    call=Tag(
        OPENER,
        re.compile(r"\s*(?P<name>[^\s<{]+)\s*"),
        ends=("\n", "<", "{"),
        leaves_end=True,
        unfinished=re.compile(r"[^\s<{]*"),
    ),
    call_end=CLOSER,
    # The key's own end stands in the body: the tag reaches up to the value.
    parameter=Tag(
        "<arg_key>",
        re.compile(r"\s*(?P<name>[^<]+?)\s*</arg_key>\s*"),
        ends=("<arg_value>",),
        unfinished=re.compile(r"[^<]*(?:<[^<]*){0,2}"),
    ),
    parameter_end="</arg_value>",
)


def make_arg_pairs(context: WireContext) -> WireCursor:
    """Read pairs; small models write JSON between the markers now and then."""
    read_json = partial(JsonBlockCursor, closer=CLOSER)
    read_pairs = partial(TaggedCursor, dialect=DIALECT)
    return ChoiceCursor(context, choices={"{": read_json, "[": read_json}, otherwise=read_pairs)
