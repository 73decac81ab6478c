"""Events of one request, from the engine, in order: plain values."""

from typing import TypeAlias

from msgspec import Struct

from backend.core.delta import FinishReason
from backend.core.status import HitKind


class StepLogprobs(Struct, frozen=True, array_like=True):
    """Natural-log probabilities of the drawn token and of the likeliest ids."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PrefillDone(Struct, frozen=True, tag=True, array_like=True):
    """The prompt is in the KV cache and decoding begins.

    Attributes:
        cached_tokens: Prompt tokens that came from the prompt cache.
        prefill_ms: Milliseconds since admission.
        hit_kind: The relation of the prompt to the stored one.
        parted_at: Where the prompt left a stored one that goes on differently; 0 is nowhere.
        ended_at: The monotonic time in seconds; `None` is when the event arrives.
    """

    cached_tokens: int
    prefill_ms: float
    hit_kind: HitKind = HitKind.MISS
    parted_at: int = 0
    ended_at: float | None = None


class TokenStep(Struct, frozen=True, tag=True, array_like=True):
    """One generated token; the last one of a request carries the finish reason.

    A stop token is published too, with `FinishReason.STOP`; its text is not part of the reply.

    Attributes:
        drafted: Of the last one: how many tokens were drafted for the request.
        accepted: How many of them it drew itself.
    """

    token_id: int
    finish_reason: FinishReason | None = None
    logprobs: StepLogprobs | None = None
    drafted: int = 0
    accepted: int = 0


EngineEvent: TypeAlias = PrefillDone | TokenStep
