"""The tools that a chat offers a model, and the source of their results."""

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from backend.cli.conversation import Turn, tool_message
from backend.cli.render import print_labelled, printable
from backend.core.prompt import ToolCall
from backend.demo import WEATHER_TOOL
from backend.pb import backend_pb2 as pb

CONDITIONS = ("sunny", "rainy", "cloudy", "windy", "foggy")
MILDEST, SPREAD = 8, 20


@dataclass(frozen=True, slots=True)
class Toolbox:
    """Tools in OpenAI's format, as JSON text, and the function that answers a call.

    An answer that the user did not type is printed.
    """

    schemas: str
    answer: Callable[[ToolCall], str]

    def answers(self, turn: Turn) -> list[pb.Message]:
        """Answer the calls of a turn, in their order."""
        return [tool_message(call, self.answer(call)) for call in turn.calls]


def weather_toolbox(console: Console) -> Toolbox:
    """Return the demo's weather tool; it makes the weather up."""

    def answer(call: ToolCall) -> str:
        result = made_up_weather(call)
        print_labelled(console, "tool", result)
        return result

    return Toolbox(json.dumps([WEATHER_TOOL]), answer)


def read_toolbox(console: Console, path: Path) -> Toolbox:
    """Return the tools listed in a JSON file; the user types their results.

    Raises:
        ValueError: It is not a JSON array.
    """
    try:
        tools = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(tools, list):
        raise ValueError(f"{path}: not a JSON array of tools")
    return Toolbox(
        json.dumps(tools, ensure_ascii=False),
        lambda call: console.input(f"{printable(call.name)} returns: ", markup=False),
    )


def made_up_weather(call: ToolCall) -> str:
    """Return a fictional weather report as JSON, the same for the same arguments."""
    digest = zlib.crc32(call.arguments.encode())
    condition = CONDITIONS[digest % len(CONDITIONS)]
    return json.dumps({"temperature": MILDEST + digest % SPREAD, "condition": condition})
