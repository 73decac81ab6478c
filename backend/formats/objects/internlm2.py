"""InternLM 2 and 2.5: one object in a plugin action."""

from backend.formats.dialects import JSON_CALLS, Reading
from backend.formats.evidence import as_tokens, in_template
from backend.formats.format import ToolFormat
from backend.formats.grammar import CallGrammar, Frame

START, PLUGIN, CLOSER = "<|action_start|>", "<|plugin|>", "<|action_end|>"
OPENER = f"{START}{PLUGIN}"

FORMAT = ToolFormat(
    name="internlm2",
    aliases=("internlm",),
    clues=(in_template(OPENER), as_tokens(START, PLUGIN)),
    openers=(OPENER,),
    closers=(CLOSER,),
    tokens=(START, PLUGIN),
    readings=(Reading(dialect=JSON_CALLS, end=CLOSER),),
    grammar=CallGrammar(
        frames=(
            Frame(
                dialect=JSON_CALLS,
                opener=OPENER,
                call=("\n", *JSON_CALLS.call, CLOSER),
                separator=(f"\n{OPENER}",),
                is_block=False,
            ),
        ),
    ),
)
