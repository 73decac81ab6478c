"""A conversation with two calls, whose results come in another order, and its answer."""

from backend.core.prompt import Message, Tool, ToolCall

WEATHER = Tool(
    name="weather",
    schema={
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
)
QUESTION = Message(role="user", content="Is it raining?")
OSLO = ToolCall(call_id="call_oslo", name="weather", arguments='{"city": "Oslo"}')
ROME = ToolCall(call_id="call_rome", name="weather", arguments='{"city": "Rome"}')
TWO_CALLS = (
    QUESTION,
    Message(role="assistant", content="Let me look.", tool_calls=(OSLO, ROME)),
    # In another order: the ids tell.
    Message(role="tool", content="sun in Rome", name="weather", tool_call_id="call_rome"),
    Message(role="tool", content="rain in Oslo", name="weather", tool_call_id="call_oslo"),
)
ANSWERED = (
    *TWO_CALLS,
    Message(role="assistant", content="Only in Oslo."),
    Message(role="user", content="Thank you."),
)
