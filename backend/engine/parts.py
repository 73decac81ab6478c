"""The parts of a loop: those that it is given, those that it makes, and their snapshot."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

from backend.config import TuningOptions
from backend.core.engine_status import EngineState, EngineStatus
from backend.core.metric_table import Number, added
from backend.engine.background.jobs import BackgroundJobs
from backend.engine.drafts.drafting import Drafting
from backend.engine.drafts.pricing import PassCosts
from backend.engine.findings import Page
from backend.engine.memory import Memory
from backend.engine.passes.batch import Batch
from backend.engine.plan import BatchPlan
from backend.engine.prefilling import Prefilling
from backend.engine.prefix_store import PrefixStore
from backend.engine.rows.admission import Reservations
from backend.engine.rows.pacing import Counters
from backend.engine.rows.scheduler import Scheduler
from backend.engine.trials.batch_check import Planning
from backend.engine.trials.draft_model import LoadedDraft
from backend.model.device import DEVICE, Threads
from backend.model.loaded import RunnableModel


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of a loop other than its model.

    Attributes:
        trials: Returns the trials that are open; `None` if there are none.
        threads: Of matrix products; `None` leaves their number as it is.
    """

    prefixes: PrefixStore
    reservations: Reservations
    draft: LoadedDraft | None = None
    trials: Callable[[], Planning] | None = None
    page: Page = field(default_factory=Page)
    threads: Threads | None = None

    @property
    def draft_bytes(self) -> int:
        """The size of the drafter's weights."""
        return self.draft.model.card.weights_bytes if self.draft else 0


class LoopParts(Protocol):
    """The parts of a running loop, as those see them that look at several of them.

    Attributes:
        memory: The memory that rows and prefixes may take.
    """

    model: RunnableModel
    resources: Resources
    scheduler: Scheduler
    batch: Batch
    prefixes: PrefixStore
    prefilling: Prefilling
    memory: Memory
    background: BackgroundJobs
    counters: Counters


def make_drafting(
    model: RunnableModel,
    plan: BatchPlan,
    resources: Resources,
    tuning: TuningOptions,
    counters: Counters,
) -> Drafting | None:
    """Return the drafting of a batch, if it is enabled and the model supports it."""
    if not plan.pass_seconds:
        return None
    costs, vocab_size = PassCosts(plan.pass_seconds, DEVICE.pass_limit_s), model.card.vocab_size
    writer = resources.draft.batch(vocab_size) if resources.draft else None
    return Drafting(costs, counters, vocab_size, tuning.speculation, writer)


def take_snapshot(loop: LoopParts) -> EngineStatus:
    """Return the status of a loop."""
    rows = loop.scheduler.rows()
    media, prompt_cache = loop.prefilling.feeder.media, loop.prefixes.metrics()
    draft_bytes = loop.resources.draft_bytes
    # A pass may still be in flight for an ended request; its result is dropped.
    is_ready = not rows and not loop.background.jobs
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
            "mlx_peak": loop.prefilling.peak_bytes,
        },
        metrics=added([loop.counters.values, prompt_cache, _numbers(loop, is_ready=is_ready)]),
        requests=tuple(
            row.status(phase, *loop.memory.reservations.held_bytes(row))
            for phase, rows in loop.scheduler.phases().items()
            for row in rows
        ),
    )


def _numbers(loop: LoopParts, *, is_ready: bool) -> dict[str, Number]:
    """Return the numbers that are measured, or counted elsewhere."""
    counters, media = loop.counters, loop.prefilling.feeder.media
    experts = loop.model.experts
    rate = counters.rate.of_late(int(counters.values["generated_tokens"]))
    return {
        "slots_taken": loop.scheduler.slots_taken,
        "waiting": loop.scheduler.waiting_count + len(loop.background.jobs),
        "prompt_tokens": loop.background.computed_tokens,
        "media_encoded": media.runs if media else 0,
        "tokens_per_s": 0.0 if is_ready else rate,
        **(experts.metrics if experts else {}),
    }
