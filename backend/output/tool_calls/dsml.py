"""Calls as `<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">…`: DeepSeek.

Versions differ in the name of the block and in what stands between the mark and a tag's word;
the opener tells which it is. The empty line before a block belongs to it.
"""

import re

from backend.output.tool_calls.markup import Tag
from backend.output.tool_calls.schema import NOT_A_STRING, STRING, JsonTypes
from backend.output.tool_calls.tagged import TaggedCursor, TaggedDialect
from backend.output.tool_calls.wire import WireContext, WireCursor

MARK = "｜DSML｜"

_EMPTY_LINE = "\n\n"
_NAMED = re.compile(r'\s+name="(?P<name>[^"<>]+)"\s*')
_TYPED = re.compile(r'\s+name="(?P<name>[^"<>]+)"(?:\s+string="(?P<string>true|false)")?\s*')


def _types_on_wire(tag: re.Match[str]) -> JsonTypes | None:
    return {"true": STRING, "false": NOT_A_STRING}.get(tag["string"])


def _dialect(between: str, block: str) -> TaggedDialect:
    begin, end = f"<{MARK}{between}", f"</{MARK}{between}"
    return TaggedDialect(
        call=Tag(f"{begin}invoke", _NAMED),
        call_end=f"{end}invoke>",
        parameter=Tag(f"{begin}parameter", _TYPED),
        parameter_end=f"{end}parameter>",
        block_end=f"{end}{block}>",
        types_on_wire=_types_on_wire,
    )


_DIALECTS = {
    f"<{MARK}{between}{block}>": _dialect(between, block)
    for between, block in (
        ("", "function_calls"),
        ("", "tool_calls"),
        (" ", "calls"),
        ("r:", "tool_calls"),
    )
}
OPENERS = (*_DIALECTS, *(_EMPTY_LINE + opener for opener in _DIALECTS))
CLOSERS = tuple(dialect.block_end for dialect in _DIALECTS.values())


def make_dsml(context: WireContext) -> WireCursor:
    """Read the version that the opener tells."""
    return TaggedCursor(context, dialect=_DIALECTS[context.opener.lstrip()])
