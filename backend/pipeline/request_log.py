"""Tracks the usage of one request, and writes its log line."""

import logging
import time
from dataclasses import dataclass, field

from msgspec.structs import replace

from backend.core.prefix_listing import HitKind
from backend.core.step import Finish, FinishReason, PrefillDone, Steps, Usage

FAILED = "error"

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestLog:
    """Measures one request from submission on; lives on the event loop."""

    request_id: str
    _usage: Usage
    _submitted_at: float = field(default_factory=time.monotonic, init=False)
    _decoding_since: float | None = field(default=None, init=False)
    _first_token_ms: float = field(default=0.0, init=False)
    _hit_kind: HitKind = field(default=HitKind.MISS, init=False)
    _parted_at: int = field(default=0, init=False)
    _drafted: int = field(default=0, init=False)
    _accepted: int = field(default=0, init=False)
    _outcome: str = field(default=FinishReason.CANCELLED.value, init=False)

    def note(self, steps: Steps, completion_tokens: int, finish: Finish | None) -> Usage:
        """Record newly arrived steps; return the counts and times so far."""
        now = time.monotonic()
        if steps.prefill is not None:
            self._note_prefill(steps.prefill, now)
        if not self._first_token_ms and steps.token_ids:
            self._first_token_ms = (now - self._submitted_at) * 1000.0
        decode_ms = (now - self._decoding_since) * 1000.0 if self._decoding_since else 0.0
        self._usage = replace(self._usage, completion_tokens=completion_tokens, decode_ms=decode_ms)
        if steps.finish_reason is not None:
            self._drafted, self._accepted = steps.drafted, steps.accepted
        if finish is not None:
            self._outcome = finish.reason.value
        return self._usage

    def fail(self) -> None:
        """Record that the request failed."""
        self._outcome = FAILED

    def close(self) -> None:
        """Write the log line; a request without a finish counts as cancelled."""
        usage = self._usage
        # A single token takes no decoding time, so it has no rate.
        seconds = usage.decode_ms / 1000.0 if usage.completion_tokens > 1 else 0.0
        log.info(
            "request id=%s prompt_tokens=%d cached_tokens=%d cache_hit=%s %sgenerated_tokens=%d "
            "first_token_ms=%.0f %s%sfinish=%s",
            self.request_id,
            usage.prompt_tokens,
            usage.cached_tokens,
            self._hit_kind.value,
            f"parted_at={self._parted_at} " if self._parted_at else "",
            usage.completion_tokens,
            self._first_token_ms,
            f"tokens_per_s={usage.completion_tokens / seconds:.1f} " if seconds else "",
            f"drafted={self._drafted} accepted={self._accepted} " if self._drafted else "",
            self._outcome,
        )

    def _note_prefill(self, done: PrefillDone, now: float) -> None:
        # Events arrive in groups: its tokens may have come with it.
        self._decoding_since = now if done.ended_at is None else done.ended_at
        self._hit_kind, self._parted_at = done.hit_kind, done.parted_at
        self._usage = replace(
            self._usage, cached_tokens=done.cached_tokens, prefill_ms=done.prefill_ms
        )
