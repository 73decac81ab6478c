"""Solar Open: `<|tool_call:begin|>ID<|tool_call:name|>f<|tool_call:args|>{…}<|tool_call:end|>`."""

from backend.formats.dialects import NamedJson, Reading
from backend.formats.evidence import as_tokens, in_template
from backend.formats.format import ReasoningFormat, ToolFormat
from backend.formats.grammar import CallGrammar, Frame
from backend.formats.template import ARGUMENTS, NAME, Characters, Id

OPENER, CLOSER = "<|tool_calls|>", "<|calls|>"
BEGIN, END = "<|tool_call:begin|>", "<|tool_call:end|>"
NAME_TAG, ARGS_TAG = "<|tool_call:name|>", "<|tool_call:args|>"
THINK, THINK_END, CONTENT = "<|think|>", "<|end|>", "<|content|>"
NEXT = "<|begin|>assistant"

CALLS = NamedJson(
    calls=((BEGIN, Id((Characters("[a-z0-9]{8}"),)), NAME_TAG, NAME, ARGS_TAG, ARGUMENTS, END),)
)

FORMAT = ToolFormat(
    name="solar_open",
    clues=(in_template(BEGIN), as_tokens(BEGIN, NAME_TAG)),
    openers=(OPENER, BEGIN),
    closers=(CLOSER,),
    tokens=(NAME_TAG, ARGS_TAG, END),
    readings=(Reading(dialect=CALLS, end=CLOSER),),
    grammar=CallGrammar(frames=(Frame(dialect=CALLS, opener=OPENER, end=CLOSER),)),
)

THOUGHT = ReasoningFormat(
    name="solar_think",
    aliases=("solar_open",),
    clues=(in_template(THINK, CONTENT), as_tokens(THINK, CONTENT)),
    starts=(THINK,),
    ends=(THINK_END,),
    frames=(NEXT, CONTENT, "<|flush|>"),
    tokens=("<|begin|>",),
    bridge=NEXT,
    answer=CONTENT,
)
