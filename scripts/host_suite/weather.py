"""The conversation in which the host's end-to-end suite asks for a tool call."""

import json

HOST_SYSTEM = "You are a helpful assistant. Use the provided tool when the user asks about weather."
HOST_QUESTION = "What's the weather like in Paris, France?"
HOST_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a location",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {
                    "type": "string",
                    "description": "The city and state, e.g. San Francisco, CA",
                }
            },
            "required": ["location"],
        },
    },
}
HOST_TOOLS = json.dumps([HOST_TOOL])
