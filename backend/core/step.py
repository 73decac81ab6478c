"""The results of a request: steps of the engine, and the deltas that are made of them."""

from enum import Enum
from typing import TypeAlias

from msgspec import Struct

from backend.core.prefix_listing import HitKind


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


class StepLogprobs(Struct, frozen=True, array_like=True):
    """Log-probabilities (natural) of the drawn token and of the most likely ids."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PrefillDone(Struct, frozen=True, tag=True, array_like=True):
    """The prompt is in the KV cache and decoding begins.

    Attributes:
        cached_tokens: Prompt tokens that came from the prompt cache.
        prefill_ms: Milliseconds since admission.
        hit_kind: How the prompt relates to the stored one.
        parted_at: Position where the prompt diverged from a stored one; 0 means nowhere.
        ended_at: Monotonic time in seconds; `None` means the time when the event arrives.
    """

    cached_tokens: int
    prefill_ms: float
    hit_kind: HitKind = HitKind.MISS
    parted_at: int = 0
    ended_at: float | None = None


class TokenStep(Struct, frozen=True, tag=True, array_like=True):
    """One generated token; the last one of a request carries the finish reason.

    A stop token is published as well, with `FinishReason.STOP`; its text is not part of the reply.

    Attributes:
        drafted: On the last token: how many tokens were drafted for the request.
        accepted: On the last token: how many of those it drew itself.
    """

    token_id: int
    finish_reason: FinishReason | None = None
    logprobs: StepLogprobs | None = None
    drafted: int = 0
    accepted: int = 0


EngineEvent: TypeAlias = PrefillDone | TokenStep


class Steps(Struct, array_like=True):
    """The events of one request since the last look at it, in columns.

    They happened in the order of the attributes. Who holds one may extend it.

    Attributes:
        token_ids: [N] the tokens.
        logprobs: [N] of each token, or none if the request has none.
        finish_reason: Of the last token, if it ends the request.
        drafted: With the last token: how many tokens were drafted for the request.
        accepted: With the last token: how many of those it drew itself.
    """

    prefill: PrefillDone | None = None
    token_ids: list[int] = []
    logprobs: list[StepLogprobs] = []
    finish_reason: FinishReason | None = None
    drafted: int = 0
    accepted: int = 0

    def add(self, event: EngineEvent) -> None:
        """Add the next event."""
        if isinstance(event, PrefillDone):
            self.prefill = event
            return
        self.token_ids.append(event.token_id)
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            self.drafted, self.accepted = event.drafted, event.accepted

    def extend(self, later: "Steps") -> None:
        """Add the events that followed."""
        self.prefill = self.prefill or later.prefill
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason
        self.drafted, self.accepted = later.drafted, later.accepted
