"""Events of one request, sent by the engine in order: plain values."""

from typing import TypeAlias

from msgspec import Struct

from backend.core.delta import FinishReason
from backend.core.prompt_cache import HitKind


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
