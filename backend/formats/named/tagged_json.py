"""A name in a tag and JSON after it, `<function=f>{…}</function>`.

Llama models learnt it from one of Meta's prompts; Functionary 3.1 writes it too.
"""

from backend.formats.dialects import NamedJson
from backend.formats.template import ARGUMENTS, NAME

OPENER, CLOSER = "<function=", "</function>"

CALLS = NamedJson(calls=((OPENER, NAME, ">", ARGUMENTS, CLOSER),))
