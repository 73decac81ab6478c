"""The wire of Kimi K3: tags between special tokens, `<|open|>call tool="f" index="1"<|sep|>…`.

The tags of the arguments tell their types. Some calls hold their arguments as one JSON object.
"""

import re
from functools import partial

from backend.output.tool_calls.markup import Tag
from backend.output.tool_calls.schema import NOT_A_STRING, STRING, JsonTypes
from backend.output.tool_calls.tagged import TaggedCursor, TaggedDialect

OPENER, CLOSER = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
TOKENS = ("<|open|>", "<|close|>", "<|sep|>")

_ENDS = ("<|sep|>",)
_ATTRIBUTE = r'\s+\w+="[^"]*"'
_TYPE = r'(?:(?=[^\n]*\stype="(?P<type>\w+)"))?'
_UNFINISHED = re.compile(r"[^\n]*")


def _unescape(attribute: str) -> str:
    return attribute.replace("&quot;", '"').replace("&amp;", "&")


def _tag(name: str, attribute: str) -> Tag:
    """Return an opening tag that is named by one of its attributes."""
    named = rf'\s+{attribute}="(?P<name>[^"]+)"'
    body = re.compile(rf"{_TYPE}(?:{_ATTRIBUTE})*?{named}(?:{_ATTRIBUTE})*\s*")
    return Tag(f"<|open|>{name}", body, _ENDS, unfinished=_UNFINISHED, unescape=_unescape)


def _types(argument: re.Match[str]) -> JsonTypes | None:
    if argument["type"] is None:
        return None
    return STRING if argument["type"] == "string" else NOT_A_STRING


DIALECT = TaggedDialect(
    call=_tag("call", "tool"),
    call_end="<|close|>call<|sep|>",
    parameter=_tag("argument", "key"),
    parameter_end="<|close|>argument<|sep|>",
    block_end=CLOSER,
    requires_ends=True,
    types_on_wire=_types,
    json_start=_tag("json", "type"),
    json_end="<|close|>json<|sep|>",
)

make_xtml = partial(TaggedCursor, dialect=DIALECT)
