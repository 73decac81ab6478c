"""Tracks the usage of one request, and writes its log line."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import assert_never

from backend.core.delta import Finish, FinishReason, Usage
from backend.core.prompt_cache import HitKind
from backend.core.step import EngineEvent, PrefillDone, TokenStep

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

    def note(
        self, events: Iterable[EngineEvent], completion_tokens: int, finish: Finish | None
    ) -> Usage:
        """Record newly arrived events; return the counts and times so far.

        Args:
            events: Events since the last call.
            completion_tokens: Tokens generated so far.
            finish: The end of the reply, if reached.
        """
        now = time.monotonic()
        for event in events:
            self._note_times(event, now)
        decode_ms = (now - self._decoding_since) * 1000.0 if self._decoding_since else 0.0
        self._usage = replace(self._usage, completion_tokens=completion_tokens, decode_ms=decode_ms)
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

    def _note_times(self, event: EngineEvent, now: float) -> None:
        match event:
            case PrefillDone():
                # Events arrive in groups: its tokens may have come with it.
                self._decoding_since = now if event.ended_at is None else event.ended_at
                self._hit_kind, self._parted_at = event.hit_kind, event.parted_at
                self._usage = replace(
                    self._usage, cached_tokens=event.cached_tokens, prefill_ms=event.prefill_ms
                )
            case TokenStep():
                self._first_token_ms = self._first_token_ms or (now - self._submitted_at) * 1000.0
                self._drafted, self._accepted = event.drafted, event.accepted
            case _:
                assert_never(event)
