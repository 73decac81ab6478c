"""The input of a model: messages, tools, media, their tokens, and the example call of templates."""

import dataclasses
import hashlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias, assert_never

from msgspec import Struct

from backend.config import MAX_AUDIO_BYTES, MAX_IMAGE_BYTES, MAX_VIDEO_BYTES

# Marks the position of a medium in text that the host composed.
MEDIA_MARKER = "<__media__>"

RESULT_ROLES = frozenset({"tool", "function"})


class MediaKind(Enum):
    """The kind of a medium."""

    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"

    @property
    def max_bytes(self) -> int:
        """Size limit of a file of this kind."""
        match self:
            case MediaKind.IMAGE:
                return MAX_IMAGE_BYTES
            case MediaKind.AUDIO:
                return MAX_AUDIO_BYTES
            case MediaKind.VIDEO:
                return MAX_VIDEO_BYTES
            case _:
                assert_never(self)


@dataclass(frozen=True, slots=True)
class Medium:
    """One image, sound or video of a request.

    Attributes:
        field: The request field it came from, for error messages: `Images[0]`.
        payload: Base64 or a data URI, as received.
    """

    kind: MediaKind
    field: str
    payload: str = dataclasses.field(repr=False)


class PreparedMedium(Struct, frozen=True, tag=True, array_like=True):
    """A medium in the form that prompts need; crosses the processes as it is.

    Attributes:
        token_ids: Tokens of that text that the tower's output replaces, with their brackets.
        inputs: Arrays for the tower, by mlx-vlm's names; `input_ids` [1, T] among them if
            mlx-vlm has other tokens for the medium.
        marks: Special tokens among the ids, as texts.
        lead: Text of the BOS token that the processor writes before every prompt with media.
        rules: Patterns in a prompt with media that the processor replaces; see `Join`.
    """

    kind: MediaKind
    digest: bytes
    text: str
    token_ids: tuple[int, ...]
    inputs: Mapping[str, Any]
    marks: frozenset[str] = frozenset()
    lead: str = ""
    rules: tuple[tuple[str, str], ...] = ()

    @property
    def upstream_ids(self) -> Sequence[int]:
        """The tokens that mlx-vlm has for the medium, `NO_TOKEN` for each that is none."""
        if (found := self.inputs.get("input_ids")) is None:
            return self.token_ids
        ids: list[int] = found.reshape(-1).tolist()
        return ids

    @property
    def nbytes(self) -> int:
        """Size of the arrays, in bytes."""
        return sum(map(_size_bytes, self.inputs.values()))

    def __repr__(self) -> str:
        return f"PreparedMedium({self.kind}, {self.text!r}, {len(self.token_ids)} tokens)"


def _size_bytes(value: Any) -> int:  # noqa: ANN401 (an array, or a list of them)
    return sum(map(_size_bytes, value)) if isinstance(value, list) else int(value.nbytes)


JsonValue: TypeAlias = (
    "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
)


ToolSchemas: TypeAlias = "Mapping[str, Mapping[str, JsonValue]]"
"""The JSON schemas of the arguments of tools, by name."""

# Leaves room for a prompt's length: an id plus a length fits in 63 bits.
_KEY_BYTES = 7
# A scope number shifted past the vocabulary fits in 63 bits as well.
_SCOPE_BYTES = 4
_VOCABULARY_BITS = 28


class Place(Enum):
    """The part of a conversation that ends at a node, as far as it is known."""

    INNER = "inner"
    SYSTEM = "system"
    MESSAGE = "message"
    PROMPT = "prompt"
    REPLY = "reply"


class ToolCall(Struct, frozen=True, gc=False):
    """An earlier call in a conversation; `arguments` is JSON text if it was valid."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Position of a medium in a message: before the character at `offset` of the content."""

    offset: int
    kind: MediaKind


class Message(Struct, frozen=True, gc=False):
    """One message of a conversation; an empty string means that the part was not given.

    Requests have thousands: as a data class one takes ten times longer to make, and four to pickle.

    Attributes:
        media: Media in the content, in order.
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
    """Whether the model may, must or must not call tools."""

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
        inputs: NumPy arrays for the model's tower, by mlx-vlm's names.
    """

    start: int
    stop: int
    digest: bytes
    inputs: Mapping[str, Any] = field(repr=False, compare=False)

    def key_ids(self, scope: str = "") -> Iterator[int]:
        """Yield a negative id per token, unique to this content and scope."""
        identity = self.digest + scope.encode()
        first = int.from_bytes(hashlib.sha256(identity).digest()[:_KEY_BYTES], "big")
        return (-1 - (first + offset) for offset in range(self.stop - self.start))


def new_scope() -> str:
    """Return a scope unique to one prompt."""
    return f"call {uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids, at least one.

    Attributes:
        tail: The last characters of the rendered text; they show which channel the reply begins in.
        boundaries: Positions where later prompts are expected to branch off; ascending, all inside
            the prompt.
        next_question: The boundary where the prompt of the next question will diverge, once the
            reply has ended; 0 if there is none before the end.
        system_tokens: Length of the prefix shared by conversations with the same system prompt and
            tools.
        media: Spans of media, in order; the last token is text.
        scope: Stored prefixes are shared only among prompts of the same scope.
        public_tokens: Length of the prefix that is shared with all scopes anyway.
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
        """Prompt cache keys of the tokens: equal media have equal keys."""
        if not self.media and not self.scope:
            return self.token_ids
        public = self.public_tokens if self.scope else len(self.token_ids)
        ids = [*self.token_ids[:public], *self.scoped_ids(self.token_ids[public:])]
        for span in self.media:
            ids[span.start : span.stop] = span.key_ids(self.scope if span.start >= public else "")
        return ids

    def scoped_ids(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the keys of text tokens that are not public."""
        if not self.scope:
            return token_ids
        base = _scope_number(self.scope) << _VOCABULARY_BITS
        return [base + token_id for token_id in token_ids]


class Hidden(Enum):
    """Why the token of a prompt cache key may not be read."""

    MEDIUM = "medium"
    SCOPE = "scope"


def token_of_key(key_id: int, scope: str = "") -> int | Hidden:
    """Return the token id of a key if it is public or belongs to the given scope.

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
    """Return a number above 0 that lifts keys above every vocabulary, within 63 bits."""
    digest = hashlib.sha256(scope.encode()).digest()
    return 1 + int.from_bytes(digest[:_SCOPE_BYTES], "big")


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
