"""The embedded demo model: where it lies, and the tool it was taught to call.

A tiny Qwen3 trained by `scripts/demo_model/train.py`; it greets, thinks, calls a weather tool
and answers from its result. Nothing here loads it.
"""

from pathlib import Path
from typing import Any

# Names the model wherever a path or a hub id is wanted.
NAME = "demo"
MODEL_DIR = Path(__file__).parent / "model"

WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city"}},
            "required": ["city"],
        },
    },
}
