"""Calls as `<function name="f"><param name="a">…</param></function>`: MiniCPM 5.

A value with markup in it stands in a CDATA section.
"""

import re
from functools import partial

from backend.output.tool_calls.markup import Tag
from backend.output.tool_calls.tagged import TaggedCursor, TaggedDialect

OPENER, CLOSER = "<function name=", "</function>"

_QUOTED = re.compile(r"""(?P<quote>["']?)(?P<name>[^"'<>]+)(?P=quote)\s*""")

DIALECT = TaggedDialect(
    call=Tag(OPENER, _QUOTED),
    call_end=CLOSER,
    parameter=Tag("<param name=", _QUOTED),
    parameter_end="</param>",
    verbatim=("<![CDATA[", "]]>"),
)

make_minicpm = partial(TaggedCursor, dialect=DIALECT)
