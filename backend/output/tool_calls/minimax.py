"""Calls as `<invoke name="f"><parameter name="a">…</parameter></invoke>`: MiniMax M2 and M3.

M3 writes a mark in front of each tag, so that no value is mistaken for one, parameters as
elements of their own name, and nested values as nested elements.
"""

import re
from functools import partial

from backend.output.tool_calls.elements import read_elements
from backend.output.tool_calls.markup import Tag
from backend.output.tool_calls.schema import ParameterTypes
from backend.output.tool_calls.tagged import TaggedCursor, TaggedDialect
from backend.output.tool_calls.typed_value import ValueWriter
from backend.output.tool_calls.wire import WireContext, WireCursor

M2_OPENER, M2_CLOSER = "<minimax:tool_call>", "</minimax:tool_call>"
MARK = "]<]minimax[>["
M3_OPENER, M3_CLOSER = f"{MARK}<tool_call>", f"{MARK}</tool_call>"

_NAMED = re.compile(r"""\s*name\s*=\s*(?P<quote>["']?)(?P<name>[^"'<>]+)(?P=quote)\s*""")
# An element is named after the parameter, or has the name as an attribute.
_ELEMENT = re.compile(
    r"""(?=(?P<tag>[^\s<>/]+))(?:parameter\s+name=["']?)?(?P<name>[^\s<>/"']+)["']?"""
)


def _make_value(types: ParameterTypes, name: str) -> ValueWriter:
    convert = partial(read_elements, mark=MARK, parts=types.inside(name))
    return ValueWriter(types.of(name), convert)


M2 = TaggedDialect(
    call=Tag("<invoke", _NAMED),
    call_end="</invoke>",
    parameter=Tag("<parameter", _NAMED),
    parameter_end="</parameter>",
    block_end=M2_CLOSER,
)
M3 = TaggedDialect(
    call=Tag(f"{MARK}<invoke", _NAMED),
    call_end=f"{MARK}</invoke>",
    parameter=Tag(f"{MARK}<", _ELEMENT),
    parameter_end=rf"{MARK}</\g<tag>>",
    block_end=M3_CLOSER,
    requires_ends=True,
    make_value=_make_value,
)


def make_minimax(context: WireContext) -> WireCursor:
    """Read the wire that the opener tells."""
    return TaggedCursor(context, dialect=M3 if context.opener == M3_OPENER else M2)
