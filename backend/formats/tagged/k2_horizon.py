"""K2 Horizon: a name and pairs in `<ifm|…>` tags, with the type of a value between, or JSON."""

from dataclasses import replace

from backend.formats.dialects import JSON_CALLS, Reading
from backend.formats.evidence import as_tokens, in_template
from backend.formats.format import ReasoningFormat, ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.tagged.pairs import pair_tags, pairs
from backend.formats.template import NAME, TYPE

OPENER, CLOSER = "<ifm|tool_calls>", "</ifm|tool_calls>"
CALL, CALL_END = "<ifm|tool_call>", "</ifm|tool_call>"
# By the effort that the request asks for.
EFFORTS = ("think", "think_fast", "think_faster")
STARTS = tuple(f"<ifm|{effort}>" for effort in EFFORTS)

TAGS = replace(
    pairs((CALL, NAME, "\n"), CALL_END, "ifm|"),
    type_tag=("<ifm|arg_type>", TYPE, "</ifm|arg_type>"),
)

FORMAT = ToolFormat(
    name="k2_horizon",
    aliases=("k2_v3",),
    clues=(in_template(CALL), as_tokens(CALL)),
    openers=(OPENER, CALL),
    closers=(CLOSER, CALL_END),
    tokens=pair_tags(TAGS),
    readings=(
        Reading(dialect=JSON_CALLS, openers=(CALL,), begins=("{", "["), end=CALL_END),
        Reading(dialect=TAGS, end=CLOSER),
    ),
    grammar=CallGrammar(
        frames=(Frame(dialect=TAGS, opener=OPENER, call=("\n", *TAGS.call), end=f"\n{CLOSER}"),),
    ),
)

THOUGHT = ReasoningFormat(
    name="k2_think",
    aliases=("k2_horizon",),
    clues=(in_template(STARTS[0]), as_tokens(STARTS[0])),
    starts=STARTS,
    ends=tuple(f"</ifm|{effort}>" for effort in EFFORTS),
)
