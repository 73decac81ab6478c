"""iQuest Coder V2: pairs as in GLM, between markers of its own."""

from backend.formats.evidence import as_tokens, in_template
from backend.formats.tagged.glm4 import glm

OPENER = "<iquestcoder_tool_call>"

FORMAT = glm(
    name="iquest_coder",
    aliases=("iquest_coder_v2", "iquest_q1"),
    opener=OPENER,
    closer="</iquestcoder_tool_call>",
    clues=(in_template(OPENER), as_tokens(OPENER)),
)
