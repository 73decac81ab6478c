"""One request inside the engine: its tokens, its KV cache and how far each has come."""

import time
from dataclasses import dataclass, field

from backend.core.delta import FinishReason
from backend.core.request import GenerationRequest
from backend.core.status import RequestPhase, RequestStatus
from backend.engine.network import Caches


@dataclass(eq=False, slots=True)
class Row:
    """One request from submission to finish; belongs to the engine thread.

    Attributes:
        token_ids: Prompt, then every generated token that has been read.
        cache: The caches of all layers while the row is alone; `None` before prefill and
            while the row is part of a batch.
        fed: How many of the tokens are in the KV cache.
        drawn: Generated tokens, the one in flight included.
        has_left: Finished or cancelled; what is still in flight for it is nobody's.
    """

    request: GenerationRequest
    submitted_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    token_ids: list[int] = field(init=False)
    cache: Caches | None = None
    fed: int = 0
    drawn: int = 0
    has_left: bool = False

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt.token_ids)

    @property
    def request_id(self) -> str:
        """The request's one name."""
        return self.request.request_id

    @property
    def prefill_left(self) -> int:
        """Tokens to feed before decoding; the last one is fed by the first decode step."""
        return len(self.token_ids) - 1 - self.fed

    @property
    def generated(self) -> int:
        """How many tokens behind the prompt have been read."""
        return len(self.token_ids) - len(self.request.prompt.token_ids)

    @property
    def wants_more(self) -> bool:
        """Whether another token may be drawn."""
        return not self.has_left and self.drawn < self.request.max_tokens

    def take(self, token_id: int) -> FinishReason | None:
        """Append a generated token and say whether it is the last."""
        self.token_ids.append(token_id)
        self.first_token_at = self.first_token_at or time.monotonic()
        if token_id in self.request.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.generated >= self.request.max_tokens else None

    def rewind(self) -> None:
        """Forget the KV cache, so that all tokens so far are prefilled again."""
        self.cache = None
        self.fed = 0
        self.drawn = self.generated

    def status(self, phase: RequestPhase) -> RequestStatus:
        """Return a snapshot."""
        prompt_tokens = len(self.request.prompt.token_ids)
        decoding_s = time.monotonic() - self.first_token_at
        return RequestStatus(
            request_id=self.request_id,
            phase=phase,
            prompt_tokens=prompt_tokens,
            prefilled_tokens=min(self.fed, prompt_tokens),
            generated_tokens=self.generated,
            first_token_ms=max(self.first_token_at - self.submitted_at, 0.0) * 1000.0,
            tokens_per_s=max(self.generated - 1, 0) / decoding_s,
        )

    def twin(self) -> "Row":
        """Return a row of the same tokens that shares nothing with this one."""
        twin = Row(self.request)
        twin.token_ids = list(self.token_ids)
        twin.rewind()
        return twin

    def cache_bytes(self) -> int:
        """Return what the row's own KV caches occupy."""
        return sum(cache.nbytes for cache in self.cache or ())
