"""The parts of a loop: those that it is given, and those that it makes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from backend.config import TuningOptions
from backend.engine.background.jobs import BackgroundJobs
from backend.engine.drafts.drafting import Drafting
from backend.engine.drafts.pricing import PassCosts
from backend.engine.findings import Page
from backend.engine.memory import Memory
from backend.engine.passes.batch import Batch
from backend.engine.plan import BatchPlan
from backend.engine.prefilling import Prefilling
from backend.engine.prefixes.store import PrefixStore
from backend.engine.rows.admission import Reservations
from backend.engine.rows.counters import Counters
from backend.engine.rows.scheduler import Scheduler
from backend.engine.trials.batch_check import Planning
from backend.engine.trials.draft_model import LoadedDraft
from backend.model.device import Threads
from backend.model.loaded import RunnableModel


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of a loop other than its model.

    Attributes:
        prefixes: Stores its prefixes.
        reservations: The memory for its KV caches.
        draft: Its drafter, if any.
        trials: Returns the trials that are open; `None` if there are none.
        page: What is known of its model.
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
        model: Its part that this process computes.
        resources: Given to the loop.
        scheduler: The open requests, and the phase of each.
        batch: The rows that decode.
        prefixes: Stored prefixes of prompts.
        prefilling: Computes chunks of prompts.
        memory: What rows and prefixes may take.
        background: Embeddings and scores.
        counters: Of tokens.
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
    costs, vocab_size = PassCosts(plan.pass_seconds), model.card.vocab_size
    writer = resources.draft.batch(vocab_size) if resources.draft else None
    return Drafting(costs, counters, vocab_size, tuning.speculation, writer)
