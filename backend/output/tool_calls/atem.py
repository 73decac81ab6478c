"""The wire of Muse: messages to recipients, and calls as `<atem:invoke name="f">…` in them.

The header tells thoughts from text; which tool is called, the tags tell.
"""

import re
from functools import partial

from backend.output.tool_calls.markup import Tag
from backend.output.tool_calls.message_dialect import START, Address, MessageDialect
from backend.output.tool_calls.messages import MessageCursor
from backend.output.tool_calls.tagged import TaggedCursor, TaggedDialect

OPENERS = ("<atem:function_calls>", "<atem:invoke")
CLOSER = "</atem:function_calls>"
NEXT, END = "<|eom|>", "<|eot|>"

_NAME = re.compile(r'\s+name="(?P<name>[^"\n]+)"\s*')
_ROLES = ("assistant", "tool", "user", "system")
_TO_SELF = re.compile(r"\bto=\s*self\b")

TAGS = TaggedDialect(
    call=Tag("<atem:invoke", _NAME),
    call_end="</atem:invoke>",
    parameter=Tag("<atem:parameter", _NAME),
    parameter_end="</atem:parameter>",
    block_end=CLOSER,
    requires_ends=True,
)


def read_header(header: str) -> Address:
    """Tell who a message is for."""
    return Address(is_thought=_TO_SELF.search(header) is not None)


DIALECT = MessageDialect(
    read=read_header,
    header_words=frozenset(),
    heads=tuple(START + role for role in _ROLES),
    ends=(NEXT, END),
    last_ends=(END,),
    call_openers=OPENERS,
    make_block=partial(TaggedCursor, dialect=TAGS),
)

make_muse = partial(MessageCursor, dialect=DIALECT)
