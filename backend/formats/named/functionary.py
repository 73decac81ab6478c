"""Functionary 3.2: `>>>f` and JSON on the next line, or `>>>all` and text.

The prompt ends with the first `>>>`, so the reply begins with a recipient.
"""

from backend.formats.dialects import Markup, NamedJson, Reading
from backend.formats.evidence import in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame, Section
from backend.formats.named import tagged_json
from backend.formats.template import ARGUMENTS, NAME

OPENER = ">>>"
TO_ALL = "all\n"

CALLS = NamedJson(calls=((NAME, "\n", ARGUMENTS),))

FORMAT = ToolFormat(
    name="functionary",
    clues=(in_template(f"{OPENER}all"), in_template(f"'{OPENER}'")),
    openers=(OPENER, tagged_json.OPENER),
    readings=(
        Reading(dialect=tagged_json.CALLS, openers=(tagged_json.OPENER,)),
        Reading(dialect=Markup(TO_ALL), openers=("", OPENER), begins=(TO_ALL,)),
        # Not every prompt ends with it: then the router meets the opener.
        Reading(dialect=Markup(""), openers=("",), begins=(OPENER,)),
        Reading(dialect=CALLS, openers=("", OPENER)),
    ),
    owns_reply=True,
    grammar=CallGrammar(
        frames=(Frame(dialect=CALLS, opener="", separator=(OPENER,)),),
        around=Section(begin=TO_ALL, end=OPENER),
    ),
)
