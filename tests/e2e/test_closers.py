"""Values that contain closers of their own format, through the socket."""

import json

import pytest
from serving import chat, stream, user

from backend.demo import MODEL_DIR

pytestmark = pytest.mark.mlx

# The demo model has tokens for `<tool_call>` and `</tool_call>`; all other marks are text.
TEXTS = {
    "qwen3_coder_xml": [
        "a </parameter> b </function>",
        "<parameter=x>\n</parameter>\n</function>\n. <tool_call> </think>\n",
    ],
    "glm4": ["a </arg_value> b </tool_call>", "</arg_value>x<arg_key></tool_call>\n"],
    "minimax_m2": ['</parameter>, </invoke>, <parameter name="x"></minimax:tool_call>.'],
    "gemma4": ['a <|"|> b <|"|>, c', '<|"|>}<tool_call|>'],
    "minicpm5": ["</param> & ]]> <![CDATA["],
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.one_in(2)
async def test_a_required_call_holds_a_text_with_closers(shared, name):
    async with shared(MODEL_DIR, Options=[f"tool_parser!:{name}"]) as backend:
        for text in TEXTS[name]:
            schema = {
                "type": "object",
                "properties": {
                    "text": {"const": text},
                    "after": {"type": "string", "maxLength": 4},
                },
                "required": ["text", "after"],
            }
            function = {"name": "write", "description": "Write.", "parameters": schema}
            tools = [{"type": "function", "function": function}]
            asked = chat([user("Write.")], tools=tools, Tokens=300, ToolChoice="required")
            reply = await stream(backend.stub, asked)
            [call] = reply.calls.values()
            assert call["name"] == "write"
            assert json.loads(call["arguments"])["text"] == text
