"""Wires that are lists of JSON objects, each between markers of its own, or bare."""

from functools import partial

from backend.output.tool_calls.json_block import JsonBlockCursor
from backend.output.tool_calls.json_call import CallKeys

_COHERE_KEYS = CallKeys(
    names=("tool_name", "name"),
    arguments=("parameters", "arguments"),
    ids=("tool_call_id", "tool_call_id_id"),
)

make_bare = partial(JsonBlockCursor)
make_cohere = partial(JsonBlockCursor, closer="<|END_ACTION|>", keys=_COHERE_KEYS)
make_json_list = partial(JsonBlockCursor, closer="</tool_calls>")
make_nemotron = partial(JsonBlockCursor, closer="</TOOLCALL>")
make_phi4 = partial(JsonBlockCursor, closer="<|/tool_call|>")
