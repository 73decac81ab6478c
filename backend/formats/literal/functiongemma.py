"""FunctionGemma."""

from backend.formats.literal.gemma import gemma

OPENER, CLOSER = "<start_function_call>", "<end_function_call>"

RESPONSE = "<start_function_response>"

FORMAT = gemma(
    "functiongemma",
    (OPENER,),
    (CLOSER,),
    quote="<escape>",
    clue=(OPENER,),
    leaks=(RESPONSE,),
)
