"""Hunyuan 3 as released, with a suffix on all tags, `<tool_call:opensource>`."""

from backend.formats.evidence import as_tokens, in_template
from backend.formats.format import ReasoningFormat
from backend.formats.tagged.hunyuan import hunyuan

SUFFIX = ":opensource"
THINK = f"<think{SUFFIX}>"

FORMAT = hunyuan("hunyuan_v3_opensource", ("hy_v3_opensource",), SUFFIX)

THOUGHT = ReasoningFormat(
    name="hunyuan_think",
    aliases=("hy_v3_opensource",),
    clues=(as_tokens(THINK), in_template(THINK)),
    starts=(THINK,),
    ends=(f"</think{SUFFIX}>",),
)
