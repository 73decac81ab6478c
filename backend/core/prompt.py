"""The input of a model: messages, tools, and their tokens."""

import hashlib
import uuid
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
# So do a scope and an id.
_SCOPE_BYTES = 4
_VOCABULARY_BITS = 28


class Place(Enum):
    """The part of a conversation that ends at a node, as far as that is known."""

    INNER = "inner"
    SYSTEM = "system"
    MESSAGE = "message"
    PROMPT = "prompt"
    REPLY = "reply"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A past call in a conversation; `arguments` is JSON text, if it was valid."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a medium in a message: before the character `offset` of its content."""

    offset: int
    kind: MediaKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation; an empty string is a part that was not given.

    Attributes:
        media: The media in the content, in order.
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

    @property
    def is_strict(self) -> bool:
        """Whether the caller wants arguments to follow the schema."""
        function = self.schema.get("function")
        return isinstance(function, Mapping) and function.get("strict") is True


class ToolMode(Enum):
    """The permission, duty or ban to call tools."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The caller's choice; only `ToolMode.NAMED` sets `name`."""

    mode: ToolMode = ToolMode.AUTO
    name: str = ""


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Tokens of a prompt that stand for an image, a sound or a video.

    Attributes:
        start: Position of the first.
        stop: Position after the last.
        digest: Identifies the medium.
        inputs: NumPy arrays for the model's tower, by mlx-vlm's names.
    """

    start: int
    stop: int
    digest: bytes
    inputs: Mapping[str, Any] = field(repr=False, compare=False)

    def key_ids(self, scope: str = "") -> Iterator[int]:
        """Yield an id for each token, below 0, that no other content has, nor another scope."""
        identity = self.digest + scope.encode()
        first = int.from_bytes(hashlib.sha256(identity).digest()[:_KEY_BYTES], "big")
        return (-1 - (first + offset) for offset in range(self.stop - self.start))


def new_scope() -> str:
    """Return a scope that no other prompt has."""
    return f"call {uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the model reads it: at least one token id.

    Attributes:
        tail: The last characters of the rendered text, which show the channel that the reply
            begins in.
        boundaries: Positions where later prompts are expected to branch off; ascending, inside the
            prompt.
        next_question: The one of them where the prompt of the next question is going to diverge,
            once the reply has ended; 0 if that is not before the end.
        system_tokens: Tokens shared with other conversations of the same system prompt and tools.
        media: Spans of media, in order; the last token is text.
        scope: The prompts that this one shares stored prefixes with: those of the same scope.
        public_tokens: How many first tokens it shares with all scopes all the same.
    """

    token_ids: tuple[int, ...]
    tail: str = field(default="", repr=False)
    boundaries: tuple[int, ...] = ()
    next_question: int = 0
    system_tokens: int = 0
    media: tuple[MediaSpan, ...] = ()
    scope: str = ""
    public_tokens: int = 0

    @property
    def key_ids(self) -> Sequence[int]:
        """The keys of the tokens in the prompt cache: equal media have equal keys."""
        if not self.media and not self.scope:
            return self.token_ids
        public = self.public_tokens if self.scope else len(self.token_ids)
        ids = [*self.token_ids[:public], *self.scoped_ids(self.token_ids[public:])]
        for span in self.media:
            ids[span.start : span.stop] = span.key_ids(self.scope if span.start >= public else "")
        return ids

    def scoped_ids(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the keys of tokens of text that are not public."""
        if not self.scope:
            return token_ids
        base = _scope_number(self.scope) << _VOCABULARY_BITS
        return [base + token_id for token_id in token_ids]


class Hidden(Enum):
    """What a key of the prompt cache stands for when it is no token that may be read."""

    MEDIUM = "medium"
    SCOPE = "scope"


def token_of_key(key_id: int, scope: str = "") -> int | Hidden:
    """Return the token id of a key, if it is public or of a scope that is named.

    Args:
        key_id: One of `Prompt.key_ids`.
        scope: The scope whose tokens may be read; empty for none.
    """
    if key_id < 0:
        return Hidden.MEDIUM
    number, token_id = divmod(key_id, 1 << _VOCABULARY_BITS)
    is_readable = number == 0 or (scope and number == _scope_number(scope))
    return token_id if is_readable else Hidden.SCOPE


def _scope_number(scope: str) -> int:
    """Return a number above 0: with it keys stand above every vocabulary, and within 63 bits."""
    digest = hashlib.sha256(scope.encode()).digest()
    return 1 + int.from_bytes(digest[:_SCOPE_BYTES], "big")
