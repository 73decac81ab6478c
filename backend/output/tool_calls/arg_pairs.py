"""Calls as a name and pairs, `<tool_call>f<arg_key>a</arg_key><arg_value>…</arg_value>…`.

The wire of GLM, with newlines between the tags (4.5, 4.6) or without (4.7 and later), and with
other tags that of LongCat.
"""

import re
from functools import partial

from backend.output.tool_calls.choice import ChoiceCursor
from backend.output.tool_calls.json_block import JsonBlockCursor
from backend.output.tool_calls.markup import Tag
from backend.output.tool_calls.tagged import TaggedCursor, TaggedDialect
from backend.output.tool_calls.wire import WireContext, WireCursor

OPENER, CLOSER = "<tool_call>", "</tool_call>"
LONGCAT_OPENER, LONGCAT_CLOSER = "<longcat_tool_call>", "</longcat_tool_call>"
# Around a key, and around its value.
TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
LONGCAT_TAGS = (
    *("<longcat_arg_key>", "</longcat_arg_key>"),
    *("<longcat_arg_value>", "</longcat_arg_value>"),
)

_NAME = r"[^\S\n]*(?P<name>[^\s<{]+)[^\S\n]*"
_UNFINISHED_NAME = r"[^\S\n]*[^\s<{]*[^\S\n]*"


def pairs(call: Tag, call_end: str, tags: tuple[str, ...], block_end: str = "") -> TaggedDialect:
    """Return a wire of pairs; the tags are those around a key and around a value."""
    key, key_end, value, value_end = tags
    return TaggedDialect(
        call=call,
        call_end=call_end,
        # The key's own end stands in the body: the tag reaches up to the value.
        parameter=Tag(
            key,
            re.compile(rf"\s*(?P<name>[^<]+?)\s*{key_end}\s*"),
            ends=(value,),
            unfinished=re.compile(r"[^<]*(?:<[^<]*){0,2}"),
        ),
        parameter_end=value_end,
        block_end=block_end,
    )


def _name_on_a_line(opener: str) -> Tag:
    """Return the tag of a call whose name ends with its line, or before its arguments."""
    name, unfinished = re.compile(_NAME), re.compile(_UNFINISHED_NAME)
    return Tag(opener, name, ends=("\n", "<", "{"), leaves_end=True, unfinished=unfinished)


GLM = pairs(_name_on_a_line(OPENER), CLOSER, TAGS)
LONGCAT = pairs(_name_on_a_line(LONGCAT_OPENER), LONGCAT_CLOSER, LONGCAT_TAGS)


def make_arg_pairs(context: WireContext) -> WireCursor:
    """Read pairs; small models write JSON between the markers now and then."""
    return _pairs_or_json(context, GLM)


def make_longcat(context: WireContext) -> WireCursor:
    """Read pairs or JSON: checkpoints differ."""
    return _pairs_or_json(context, LONGCAT)


def _pairs_or_json(context: WireContext, dialect: TaggedDialect) -> WireCursor:
    read_json = partial(JsonBlockCursor, closer=dialect.call_end)
    read_pairs = partial(TaggedCursor, dialect=dialect)
    return ChoiceCursor(context, choices={"{": read_json, "[": read_json}, otherwise=read_pairs)
