"""Hunyuan 4: the tags of Hunyuan 3 with a suffix per checkpoint, and often no end of the name.

The suffix is in the vocabulary: `<tool_calls:6124c78e>`, `<think:6124c78e>`.
"""

import re
from functools import cache

from backend.formats.evidence import FormatEvidence
from backend.formats.format import ReasoningFormat, ToolFormat
from backend.formats.tagged.hunyuan import hunyuan

# That of the first checkpoints, for replies without one to look at.
SUFFIX = ":6124c78e"
_KEY = re.compile(r"<arg_key(:[\w.-]{1,32})>")
_THINK = re.compile(r"<think(:[\w.-]{1,32})>")


def _own_tools(evidence: FormatEvidence) -> ToolFormat | None:
    suffix = evidence.find(_KEY)
    if not suffix:
        return None
    return _tools(suffix, has_name_end=evidence.has(f"<tool_sep{suffix}>"))


def _own_thought(evidence: FormatEvidence) -> ReasoningFormat | None:
    suffix = evidence.find(_THINK)
    return _thought(suffix) if suffix else None


@cache
def _tools(suffix: str, *, has_name_end: bool = False) -> ToolFormat:
    aliases = ("hy_v4", "hy4")
    return hunyuan("hunyuan_v4", aliases, suffix, has_name_end=has_name_end, own=_own_tools)


@cache
def _thought(suffix: str) -> ReasoningFormat:
    return ReasoningFormat(
        name="hunyuan_v4_think",
        aliases=("hy_v4",),
        starts=(f"<think{suffix}>",),
        ends=(f"</think{suffix}>",),
        own=_own_thought,
    )


FORMAT, THOUGHT = _tools(SUFFIX), _thought(SUFFIX)
