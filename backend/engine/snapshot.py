"""The snapshot of a loop."""

import mlx.core as mx

from backend.core.metric_table import Number, added
from backend.core.status import EngineState, EngineStatus
from backend.engine.parts import LoopParts


def take_snapshot(loop: LoopParts) -> EngineStatus:
    """Return the status of a loop."""
    rows = loop.scheduler.rows()
    media, prompt_cache = loop.prefilling.media, loop.prefixes.metrics()
    draft_bytes = loop.resources.draft_bytes
    # A pass may still be in flight for an ended request; its result is dropped.
    is_ready = not rows and not loop.background.is_computing
    return EngineStatus(
        state=EngineState.READY if is_ready else EngineState.BUSY,
        memory_bytes={
            "weights": loop.model.card.weights_bytes,
            **({"draft_weights": draft_bytes} if draft_bytes else {}),
            "kv_active": loop.batch.cache_bytes() + sum(row.cache_bytes() for row in rows),
            **loop.memory.status(),
            "prompt_cache": int(prompt_cache["prompt_cache.bytes"]),
            "media": media.nbytes if media else 0,
            "mlx_active": mx.get_active_memory(),
            "mlx_cache": mx.get_cache_memory(),
            "mlx_peak": mx.get_peak_memory(),
        },
        metrics=added([loop.counters.values, prompt_cache, _numbers(loop, is_ready=is_ready)]),
        requests=tuple(
            row.status(phase, *loop.memory.held_bytes(row))
            for phase, rows in loop.scheduler.phases().items()
            for row in rows
        ),
    )


def _numbers(loop: LoopParts, *, is_ready: bool) -> dict[str, Number]:
    """Return the numbers that are measured, or counted elsewhere."""
    counters, media = loop.counters, loop.prefilling.media
    rate = counters.rate.of_late(int(counters.values["generated_tokens"]))
    return {
        "slots_taken": loop.scheduler.slots_taken,
        "waiting": loop.scheduler.waiting_count + loop.background.count,
        "prompt_tokens": loop.background.computed_tokens,
        "media_encoded": media.runs if media else 0,
        "tokens_per_s": 0.0 if is_ready else rate,
    }
