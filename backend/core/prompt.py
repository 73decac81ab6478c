"""What goes into a model: messages, tools, and the tokens that they become."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from backend.core.media import MediaKind

JsonValue: TypeAlias = (
    "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
)


# An id and a prompt's length fit in 63 bits together.
_KEY_BYTES = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call in a conversation's past; `arguments` is JSON text, or whatever stood in its place."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a medium stands in a message: before the character `offset` of its content."""

    offset: int
    kind: MediaKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation; an empty string is a part that was not given.

    Attributes:
        media: What stands in the content beside its text, in order.
    """

    role: str
    content: str = ""
    name: str = ""
    tool_call_id: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    media: tuple[Placement, ...] = ()


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
class MediaSpan:
    """Tokens of a prompt that stand for a picture, a sound or a video.

    Attributes:
        start: The first of them.
        stop: The first behind them.
        digest: Identifies what they stand for.
        inputs: What the model's tower reads, by the names of mlx-vlm: NumPy arrays.
    """

    start: int
    stop: int
    digest: bytes
    inputs: Mapping[str, Any] = field(repr=False, compare=False)

    def key_ids(self) -> Iterator[int]:
        """Yield an id for each token, below 0, that no other content has."""
        first = int.from_bytes(hashlib.sha256(self.digest).digest()[:_KEY_BYTES], "big")
        return (-1 - (first + offset) for offset in range(self.stop - self.start))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the model reads it: at least one token id.

    Attributes:
        tail: The last characters of the rendered text: they tell in which channel
            the reply begins.
        boundaries: Where later prompts are expected to branch off, in tokens; ascending, and
            inside the prompt.
        system_tokens: What other conversations with the same system prompt and tools share.
        media: What is not text in it, in order; the last token is text.
    """

    token_ids: tuple[int, ...]
    tail: str = field(default="", repr=False)
    boundaries: tuple[int, ...] = ()
    system_tokens: int = 0
    media: tuple[MediaSpan, ...] = ()

    @property
    def key_ids(self) -> Sequence[int]:
        """What the prompt cache knows the tokens by: the same picture has the same ids."""
        if not self.media:
            return self.token_ids
        ids = list(self.token_ids)
        for span in self.media:
            ids[span.start : span.stop] = span.key_ids()
        return ids
