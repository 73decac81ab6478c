"""The parts of a reply: deltas, and one `Finish` at the end."""

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class FinishReason(Enum):
    """The reason why a reply ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Visible text; whole code points."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text of the thought."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of call number `index`: its first has id and name, arguments append.

    An id in a later piece replaces the first: some models write it after the arguments.
    """

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


Delta: TypeAlias = ContentDelta | ReasoningDelta | ToolCallDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Cumulative counts and times of one request.

    Attributes:
        cached_tokens: Prompt tokens that came from the prompt cache.
        completion_tokens: Generated tokens, without the one that ended the reply by `stop`.
        prefill_ms: From admission until decoding began.
        decode_ms: From there until now.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class AlternativeLogprob:
    """A token that could have been drawn, and its natural-log probability."""

    token_id: int
    token: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A generated token, its natural-log probability and its likeliest alternatives."""

    token_id: int
    token: bytes
    logprob: float
    top: tuple[AlternativeLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a reply; `logprobs` holds every counted token if they were asked for."""

    reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Increment:
    """The deltas of one or more engine steps.

    Only the last increment of a stream has a `finish`.
    """

    deltas: tuple[Delta, ...]
    usage: Usage
    finish: Finish | None = None
