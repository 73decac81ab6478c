"""What one request has come to: its usage as it grows, and the one log line at its end."""

import logging
import time
from dataclasses import dataclass, field, replace
from typing import assert_never

from backend.core.delta import Finish, FinishReason, Usage
from backend.core.status import HitKind
from backend.core.step import EngineEvent, PrefillDone, TokenStep

FAILED = "error"

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestJournal:
    """Follows one request from its submission on; lives on the event loop.

    Attributes:
        usage: Cumulative counts and times.
    """

    request_id: str
    usage: Usage
    _submitted_at: float = field(default_factory=time.monotonic, init=False)
    _decoding_since: float | None = field(default=None, init=False)
    _first_token_ms: float = field(default=0.0, init=False)
    _hit_kind: HitKind = field(default=HitKind.MISS, init=False)
    _outcome: str = field(default=FinishReason.CANCELLED.value, init=False)

    def note(self, event: EngineEvent) -> None:
        """Take over the times of an event."""
        now = time.monotonic()
        match event:
            case PrefillDone():
                self._decoding_since = now
                self._hit_kind = event.hit_kind
                self.usage = replace(
                    self.usage, cached_tokens=event.cached_tokens, prefill_ms=event.prefill_ms
                )
            case TokenStep():
                self._first_token_ms = self._first_token_ms or (now - self._submitted_at) * 1000.0
            case _:
                assert_never(event)

    def count(self, completion_tokens: int, finish: Finish | None) -> None:
        """Bring the cumulative counts up to date."""
        now = time.monotonic()
        decode_ms = (now - self._decoding_since) * 1000.0 if self._decoding_since else 0.0
        self.usage = replace(self.usage, completion_tokens=completion_tokens, decode_ms=decode_ms)
        if finish is not None:
            self._outcome = finish.reason.value

    def fail(self) -> None:
        """Note that the request ended with an error."""
        self._outcome = FAILED

    def close(self) -> None:
        """Write the request's line; a request that did not end by itself was cancelled."""
        usage = self.usage
        seconds = usage.decode_ms / 1000.0
        log.info(
            "request id=%s prompt_tokens=%d cached_tokens=%d cache_hit=%s generated_tokens=%d "
            "first_token_ms=%.0f tokens_per_s=%.1f finish=%s",
            self.request_id,
            usage.prompt_tokens,
            usage.cached_tokens,
            self._hit_kind.value,
            usage.completion_tokens,
            self._first_token_ms,
            usage.completion_tokens / seconds if seconds else 0.0,
            self._outcome,
        )
