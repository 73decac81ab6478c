"""The client's side of a conversation: its messages, and the kept part of a reply."""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import assert_never

from backend.core.delta import ContentDelta, Increment, ReasoningDelta, ToolCallDelta, Usage
from backend.core.prompt import ToolCall
from backend.pb import backend_pb2 as pb


@dataclass(slots=True)
class Turn:
    """One reply of the model, as far as it has arrived."""

    content: str = ""
    reasoning: str = ""
    usage: Usage = field(default_factory=Usage)
    _calls: dict[int, ToolCall] = field(default_factory=dict)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The tool calls, in order."""
        return tuple(self._calls[index] for index in sorted(self._calls))

    def add(self, increment: Increment) -> None:
        """Append an increment."""
        self.usage = increment.usage
        for delta in increment.deltas:
            match delta:
                case ContentDelta(text):
                    self.content += text
                case ReasoningDelta(text):
                    self.reasoning += text
                case ToolCallDelta():
                    self._add_call(delta)
                case _:
                    assert_never(delta)

    def message(self) -> pb.Message:
        """Return the turn as a message of the next request."""
        calls = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in self.calls
        ]
        return pb.Message(
            role="assistant",
            content=self.content,
            reasoning_content=self.reasoning,
            tool_calls=json.dumps(calls, ensure_ascii=False) if calls else "",
        )

    def _add_call(self, piece: ToolCallDelta) -> None:
        call = self._calls.get(piece.index, ToolCall(call_id="", name="", arguments=""))
        self._calls[piece.index] = extended(call, piece)


def extended(call: ToolCall, piece: ToolCallDelta) -> ToolCall:
    """Return a call with one more piece: id and name replace, arguments append."""
    return replace(
        call,
        call_id=piece.call_id or call.call_id,
        name=piece.name or call.name,
        arguments=call.arguments + piece.arguments,
    )


PICTURE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"})


def named_pictures(text: str) -> Iterator[Path]:
    """Yield the files that words of a text name, if they are pictures that exist."""
    for word in text.split():
        path = Path(word.strip("'\"")).expanduser()
        if path.suffix.lower() in PICTURE_SUFFIXES and path.is_file():
            yield path


def encoded(path: Path) -> str:
    """Return a file as the protocol's `Images` has it.

    Raises:
        OSError: It cannot be read.
    """
    return base64.b64encode(path.read_bytes()).decode()


def user_message(text: str) -> pb.Message:
    """Return the user's message."""
    return pb.Message(role="user", content=text)


def tool_message(call: ToolCall, result: str) -> pb.Message:
    """Return the result of a call."""
    return pb.Message(role="tool", name=call.name, tool_call_id=call.call_id, content=result)


def model_options(model: str) -> pb.ModelOptions:
    """Return the options to load a model: from its path if it exists, else by its name."""
    path = Path(model).expanduser()
    return pb.ModelOptions(Model=model, ModelFile=str(path.resolve()) if path.exists() else "")
