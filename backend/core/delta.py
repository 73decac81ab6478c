"""The parts of a reply: deltas, and one `Finish` at the end."""

from enum import Enum
from typing import TypeAlias

from msgspec import Struct


class FinishReason(Enum):
    """Why a reply ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"


class ContentDelta(Struct, frozen=True):
    """Visible text, in whole code points."""

    text: str


class ReasoningDelta(Struct, frozen=True):
    """Reasoning text."""

    text: str


class ToolCallDelta(Struct, frozen=True):
    """A piece of call number `index`: the first has id and name; arguments are appended.

    An id in a later piece replaces the first one: some models write it after the arguments.
    """

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


Delta: TypeAlias = ContentDelta | ReasoningDelta | ToolCallDelta


class Usage(Struct, frozen=True, kw_only=True):
    """Cumulative counts and times of one request.

    Attributes:
        cached_tokens: Prompt tokens that came from the prompt cache.
        completion_tokens: Generated tokens, without the stop token that ended the reply.
        prefill_ms: From admission to the start of decoding.
        decode_ms: From the start of decoding until now.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


class AlternativeLogprob(Struct, frozen=True):
    """A token that could have been drawn, and its log-probability (natural)."""

    token_id: int
    token: bytes
    logprob: float


class TokenLogprob(Struct, frozen=True):
    """A generated token, its log-probability (natural) and its most likely alternatives."""

    token_id: int
    token: bytes
    logprob: float
    top: tuple[AlternativeLogprob, ...] = ()


class Finish(Struct, frozen=True):
    """The end of a reply; `logprobs` covers every counted token if requested."""

    reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()


class Increment(Struct, frozen=True):
    """The deltas of one or more engine steps.

    Only the last increment of a stream has a `finish`.
    """

    deltas: tuple[Delta, ...]
    usage: Usage
    finish: Finish | None = None
