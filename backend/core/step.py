"""What a request does in the engine: events, and all of them since the last look together."""

from typing import Self, TypeAlias

from msgspec import Struct

from backend.core.delta import FinishReason
from backend.core.prefix_listing import HitKind


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
        prefill: The end of the prefill, if it was among them.
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

    @classmethod
    def of(cls, *events: EngineEvent) -> Self:
        """Return events together."""
        steps = cls()
        for event in events:
            steps.add(event)
        return steps

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
