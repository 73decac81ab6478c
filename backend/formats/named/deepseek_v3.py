"""DeepSeek V3 and R1."""

from backend.formats.dialects import NamedJson
from backend.formats.evidence import Clue
from backend.formats.named.deepseek import FENCED, OPENER, PLAIN, deepseek_format

FORMAT = deepseek_format(
    "deepseek_v3",
    NamedJson(calls=(FENCED, PLAIN)),
    clue=Clue(template=("```json",), anywhere=(OPENER,)),
    separator="\n",
    aliases=("deepseek", "deepseek_r1"),
)
