"""MiroThinker: a server name, a tool name and JSON in MCP tags."""

from backend.formats.dialects import NamedJson, Reading
from backend.formats.evidence import in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.template import ARGUMENTS, NAME, Characters

OPENER, CLOSER = "<use_mcp_tool>", "</use_mcp_tool>"

CALLS = NamedJson(
    calls=(
        (
            *(OPENER, "\n<server_name>", Characters("[A-Za-z0-9_ .:-]{1,64}"), "</server_name>"),
            *("\n<tool_name>", NAME, "</tool_name>\n<arguments>\n", ARGUMENTS),
            *("\n</arguments>", f"\n{CLOSER}"),
        ),
    )
)

FORMAT = ToolFormat(
    name="mirothinker",
    aliases=("mcp",),
    clues=(in_template(OPENER),),
    openers=(OPENER,),
    closers=(CLOSER,),
    readings=(Reading(dialect=CALLS),),
    grammar=CallGrammar(
        frames=(Frame(dialect=CALLS, opener=OPENER, separator=("\n",), is_block=False),),
    ),
)
