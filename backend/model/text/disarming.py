"""Rewrites the texts that a caller puts into a prompt, wherever they stand in it."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

from backend.core.prompt import JsonValue, Message, Placement, Tool, ToolCall


class Disarmer(ABC):
    """Changes what a text would mean to the model; made for the texts of callers."""

    @abstractmethod
    def disarmed(self, text: str) -> str:
        """Return a text without what the model would misread."""

    def disarmed_message(self, message: Message) -> Message:
        """Return the message with all of its text disarmed; its media stay in place."""
        content, media, start = "", [], 0
        for placed in message.media:
            content += self.disarmed(message.content[start : placed.offset])
            media.append(Placement(len(content), placed.kind))
            start = placed.offset
        return replace(
            message,
            content=content + self.disarmed(message.content[start:]),
            media=tuple(media),
            name=self.disarmed(message.name),
            tool_call_id=self.disarmed(message.tool_call_id),
            reasoning_content=self.disarmed(message.reasoning_content),
            tool_calls=tuple(map(self._disarmed_call, message.tool_calls)),
        )

    def disarmed_tool(self, tool: Tool) -> Tool:
        """Return the tool with its schema disarmed."""
        schema = {self.disarmed(key): self.disarmed_json(tool.schema[key]) for key in tool.schema}
        return replace(tool, schema=schema)

    def disarmed_json(self, value: JsonValue) -> JsonValue:
        """Return a value with all of its texts disarmed, keys too."""
        match value:
            case str():
                return self.disarmed(value)
            case Mapping():
                return {self.disarmed(key): self.disarmed_json(value[key]) for key in value}
            case Sequence():
                return [self.disarmed_json(each) for each in value]
            case _:
                return value

    def _disarmed_call(self, call: ToolCall) -> ToolCall:
        return replace(
            call,
            call_id=self.disarmed(call.call_id),
            name=self.disarmed(call.name),
            arguments=self._disarmed_arguments(call.arguments),
        )

    def _disarmed_arguments(self, text: str) -> str:
        """Return JSON text with its texts disarmed, formatted as before where that is possible."""
        spelled = self.disarmed(text)
        try:
            value = json.loads(text)
            safe = self.disarmed_json(value)
            if safe == value:
                return text
            if json.loads(spelled) == safe:
                return spelled
        except (ValueError, RecursionError):
            return spelled
        # Escapes such as \u003c hid something.
        return json.dumps(safe, ensure_ascii=False)
