"""A name in a tag and JSON after it, `<function=f>{…}</function>`.

One of Meta's prompts taught it to Llama models; Functionary 3.1 writes it too.
"""

from backend.formats.dialects import NamedJson
from backend.formats.template import ARGUMENTS, NAME

OPENER, CLOSER = "<function=", "</function>"

CALLS = NamedJson(calls=((OPENER, NAME, ">", ARGUMENTS, CLOSER),))
