"""Disarms callers' text that contains the placeholder of a medium."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from backend.core.prompt import Message, Placement, Tool, ToolCall

if TYPE_CHECKING:
    from collections.abc import Iterable

    from backend.core.prompt import JsonValue

# An invisible character of zero width.
_WORD_JOINER = "\u2060"


class Placeholders:
    """The texts that represent media, or parts of them, in a model's prompts."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Compile the texts.

        Args:
            texts: Each part precedes the texts that contain it.
        """
        self._texts = tuple(dict.fromkeys(texts))

    def disarmed(self, text: str) -> str:
        """Return the text with every placeholder broken by an invisible character."""
        for placeholder in self._texts:
            text = text.replace(placeholder, placeholder[0] + _WORD_JOINER + placeholder[1:])
        return text

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
            reasoning_content=self.disarmed(message.reasoning_content),
            tool_calls=tuple(map(self._disarmed_call, message.tool_calls)),
        )

    def disarmed_tool(self, tool: Tool) -> Tool:
        """Return the tool with its schema disarmed."""
        schema = {self.disarmed(key): self._disarmed_json(tool.schema[key]) for key in tool.schema}
        return replace(tool, schema=schema)

    def _disarmed_call(self, call: ToolCall) -> ToolCall:
        name = self.disarmed(call.name)
        try:
            value = json.loads(call.arguments)
            safe = self._disarmed_json(value)
        except (ValueError, RecursionError):
            return replace(call, name=name, arguments=self.disarmed(call.arguments))
        # Unchanged arguments keep their formatting.
        arguments = call.arguments if safe == value else json.dumps(safe, ensure_ascii=False)
        return replace(call, name=name, arguments=arguments)

    def _disarmed_json(self, value: JsonValue) -> JsonValue:
        match value:
            case str():
                return self.disarmed(value)
            case Mapping():
                return {self.disarmed(key): self._disarmed_json(value[key]) for key in value}
            case Sequence():
                return [self._disarmed_json(each) for each in value]
            case _:
                return value
