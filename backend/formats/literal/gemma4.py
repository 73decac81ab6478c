"""Gemma 4."""

from backend.formats.evidence import as_tokens, in_template
from backend.formats.format import ReasoningFormat
from backend.formats.literal.gemma import gemma

OPENER, CLOSER = "<|tool_call>", "<tool_call|>"
MISSPELLING = "<|tool_call|>"
RESPONSE = "<|tool_response>"
CHANNEL, CHANNEL_END = "<|channel>", "<channel|>"
THOUGHT_START = f"{CHANNEL}thought"

FORMAT = gemma(
    "gemma4",
    (OPENER, MISSPELLING),
    (CLOSER, MISSPELLING, "</tool_call>"),
    quote='<|"|>',
    clue=(OPENER, CLOSER),
    leaks=(RESPONSE,),
)

THOUGHT = ReasoningFormat(
    name="gemma4_channel",
    aliases=("gemma4", "gemma_channel"),
    clues=(as_tokens(CHANNEL, CHANNEL_END), in_template(THOUGHT_START)),
    starts=(THOUGHT_START,),
    later_starts=(f"{THOUGHT_START}\n",),
    ends=(CHANNEL_END,),
    # Models open channels without naming them.
    frames=(CHANNEL,),
    tokens=(CHANNEL,),
)
