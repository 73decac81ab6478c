"""DeepSeek V3.1 and V3.2-Exp."""

from backend.formats.dialects import NamedJson
from backend.formats.evidence import Clue
from backend.formats.named.deepseek import FENCED, OPENER, PLAIN, deepseek_format

FORMAT = deepseek_format(
    "deepseek_v31", NamedJson(calls=(PLAIN, FENCED)), clue=Clue(anywhere=(OPENER,))
)
