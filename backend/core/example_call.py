"""The example call that templates render to reveal a model's call format."""

from backend.core.prompt import Tool, ToolCall

EXAMPLE_TOOL = Tool(
    name="probe_tool",
    schema={
        "type": "function",
        "function": {
            "name": "probe_tool",
            "description": "probe",
            "parameters": {
                "type": "object",
                # Some templates demand a description here too.
                "properties": {"probe_key": {"type": "string", "description": "probe"}},
            },
        },
    },
)
EXAMPLE_CALL = ToolCall(
    call_id="probe0001", name=EXAMPLE_TOOL.name, arguments='{"probe_key": "probe_value"}'
)
