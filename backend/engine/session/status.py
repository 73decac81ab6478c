"""The snapshot of a decoder's session."""

import mlx.core as mx

from backend.core.metric_table import Number, added
from backend.core.status import EngineState, EngineStatus
from backend.engine.session.decoder_parts import DecoderParts


def take_snapshot(parts: DecoderParts, weights_bytes: int) -> EngineStatus:
    """Return the status of a session.

    Args:
        parts: Of the session.
        weights_bytes: Of its model.
    """
    rows = parts.scheduler.rows()
    media, prompt_cache = parts.prefilling.media, parts.prefixes.metrics()
    # A pass may still be in flight for an ended request; its result is dropped.
    is_ready = not rows and not parts.background.is_computing
    return EngineStatus(
        state=EngineState.READY if is_ready else EngineState.BUSY,
        memory_bytes={
            "weights": weights_bytes,
            **({"draft_weights": parts.draft_bytes} if parts.draft_bytes else {}),
            "kv_active": parts.batch.cache_bytes() + sum(row.cache_bytes() for row in rows),
            **parts.memory.status(),
            "prompt_cache": int(prompt_cache["prompt_cache.bytes"]),
            "media": media.nbytes if media else 0,
            "mlx_active": mx.get_active_memory(),
            "mlx_cache": mx.get_cache_memory(),
            "mlx_peak": mx.get_peak_memory(),
        },
        metrics=added([parts.counters.values, prompt_cache, _numbers(parts, is_ready=is_ready)]),
        requests=tuple(
            row.status(phase, *parts.memory.held_bytes(row))
            for phase, rows in parts.scheduler.phases().items()
            for row in rows
        ),
    )


def _numbers(parts: DecoderParts, *, is_ready: bool) -> dict[str, Number]:
    """Return the numbers that are measured, or counted elsewhere."""
    counters, media = parts.counters, parts.prefilling.media
    rate = counters.rate.of_late(int(counters.values["generated_tokens"]))
    return {
        "slots_taken": parts.scheduler.slots_taken,
        "waiting": parts.scheduler.waiting_count + parts.background.count,
        "prompt_tokens": parts.background.computed_tokens,
        "media_encoded": media.runs if media else 0,
        "tokens_per_s": 0.0 if is_ready else rate,
    }
