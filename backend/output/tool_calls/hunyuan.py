"""The wire of Hunyuan 3: pairs as GLM has them, but for an end of the name and a block around all.

Checkpoints are released with a suffix in all of their tags, `<tool_call:opensource>`.
"""

import re
from dataclasses import dataclass
from functools import partial

from backend.output.tool_calls.arg_pairs import CLOSER, OPENER, TAGS, pairs
from backend.output.tool_calls.markup import Tag
from backend.output.tool_calls.tagged import TaggedCursor
from backend.output.tool_calls.wire import WireFactory


@dataclass(frozen=True, slots=True)
class HunyuanWire:
    """The tags of one kind of checkpoints."""

    openers: tuple[str, ...]
    closers: tuple[str, ...]
    name_end: str
    pair_tags: tuple[str, ...]
    make_cursor: WireFactory


def _wire(suffix: str) -> HunyuanWire:
    def suffixed(*tags: str) -> tuple[str, ...]:
        return tuple(f"{tag[:-1]}{suffix}>" for tag in tags)

    block, call, name_end = suffixed("<tool_calls>", OPENER, "<tool_sep>")
    block_end, call_end = suffixed("</tool_calls>", CLOSER)
    pair_tags = suffixed(*TAGS)
    call_tag = Tag(
        call,
        re.compile(r"\s*(?P<name>[^\s<{]+)\s*"),
        ends=(name_end,),
        unfinished=re.compile(r"[^<{]*(?:<[a-z_:]*)?"),
    )
    dialect = pairs(call_tag, call_end, pair_tags, block_end)
    make_cursor = partial(TaggedCursor, dialect=dialect)
    return HunyuanWire((block, call), (block_end, call_end), name_end, pair_tags, make_cursor)


PLAIN = _wire("")
OPENSOURCE = _wire(":opensource")
