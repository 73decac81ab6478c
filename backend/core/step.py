"""What the engine thread publishes about one request: plain values, in order."""

from dataclasses import dataclass
from typing import TypeAlias

from backend.core.delta import FinishReason
from backend.core.status import HitKind


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Natural-log probabilities of the drawn token and of the likeliest ids."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The prompt is in the KV cache and decoding begins.

    Attributes:
        cached_tokens: Prompt tokens that were not computed anew.
        prefill_ms: From admission to here.
        hit_kind: How the prompt relates to what the prompt cache held.
    """

    cached_tokens: int
    prefill_ms: float
    hit_kind: HitKind = HitKind.MISS


@dataclass(frozen=True, slots=True)
class TokenStep:
    """One generated token; the last one of a request carries the finish reason.

    A stop token is published too, with `FinishReason.STOP`: its text is nobody's.
    """

    token_id: int
    finish_reason: FinishReason | None = None
    logprobs: StepLogprobs | None = None


EngineEvent: TypeAlias = PrefillDone | TokenStep
