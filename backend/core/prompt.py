"""What goes into a model: messages, tools, and the tokens that they become."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

JsonValue: TypeAlias = (
    "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call in a conversation's past; `arguments` is JSON text, or whatever stood in its place."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation; an empty string is a part that was not given."""

    role: str
    content: str = ""
    name: str = ""
    tool_call_id: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call; `schema` is the whole OpenAI-style object."""

    name: str
    schema: Mapping[str, JsonValue]

    @property
    def parameters(self) -> Mapping[str, JsonValue]:
        """The JSON schema of the arguments; empty when there is none."""
        function = self.schema.get("function")
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        return parameters if isinstance(parameters, Mapping) else {}


class ToolMode(Enum):
    """Whether the model may, must or must not call tools."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The caller's choice; `name` is set with `ToolMode.NAMED` only."""

    mode: ToolMode = ToolMode.AUTO
    name: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the model reads it: at least one token id.

    Attributes:
        tail: The last characters of the rendered text: they tell in which channel
            the reply begins.
        boundaries: Where later prompts are expected to branch off, in tokens; ascending, and
            inside the prompt.
        system_tokens: What other conversations with the same system prompt and tools share.
    """

    token_ids: tuple[int, ...]
    tail: str = field(default="", repr=False)
    boundaries: tuple[int, ...] = ()
    system_tokens: int = 0
