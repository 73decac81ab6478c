"""The parts of a decoder's session, put together."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from backend.config import TuningOptions
from backend.engine.background.jobs import BackgroundJobs
from backend.engine.background.work import JobFactory
from backend.engine.drafts.costs import PassCosts
from backend.engine.drafts.drafting import Drafting
from backend.engine.findings import Page
from backend.engine.messages.publisher import Publisher
from backend.engine.passes.batch import Batch
from backend.engine.passes.caches import CacheFactory
from backend.engine.passes.feeder import make_feeder
from backend.engine.passes.isolation import Isolation
from backend.engine.plan import BatchPlan
from backend.engine.prefixes.store import PrefixStore
from backend.engine.rows.admission import Reservations
from backend.engine.rows.counters import Counters
from backend.engine.rows.pacing import PrefillPacer
from backend.engine.rows.scheduler import Scheduler
from backend.engine.session.adoption import Adoption
from backend.engine.session.decoding import Decoding
from backend.engine.session.delivery import Delivery
from backend.engine.session.examination import Examination
from backend.engine.session.memory_watch import MemoryWatch
from backend.engine.session.open_requests import OpenRequests
from backend.engine.session.prefilling import Prefilling
from backend.engine.session.recovery import Recovery
from backend.engine.session.session import Outlets
from backend.engine.trials.batch_check import Planning
from backend.engine.trials.draft_model import LoadedDraft
from backend.model.device import Threads
from backend.model.loaded import RunnableModel


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """The parts used by the turns of a session; belongs to the main thread.

    Attributes:
        prefixes: Stores prefixes of prompts.
        scheduler: Tracks waiting and running rows.
        publisher: Sends events.
        memory: Keeps rows and prompt cache within their memory.
        requests: The open requests.
        background: Jobs that run between steps.
        job_factory: Creates them.
        pacer: Fits prefill between decode steps.
        batch: The rows that decode.
        recovery: Finds the request to blame for a failed pass.
        prefilling: Computes chunks.
        decoding: Computes steps.
        counters: Count tokens.
        draft_bytes: Weights of the draft model.
        adoption: Changes how rows are batched.
        examination: The trials that are open.
    """

    prefixes: PrefixStore
    scheduler: Scheduler
    publisher: Publisher
    memory: MemoryWatch
    requests: OpenRequests
    background: BackgroundJobs
    job_factory: JobFactory
    pacer: PrefillPacer
    batch: Batch
    recovery: Recovery
    prefilling: Prefilling
    decoding: Decoding
    counters: Counters
    draft_bytes: int
    adoption: Adoption
    examination: Examination


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of a session other than its model.

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


def make_parts(
    model: RunnableModel,
    fresh_caches: CacheFactory,
    resources: Resources,
    tuning: TuningOptions,
    outlets: Outlets,
) -> DecoderParts:
    """Return the parts of an idle session.

    Args:
        model: A model that belongs to this thread.
        fresh_caches: Creates its caches.
        resources: The other resources.
        tuning: Its limits.
        outlets: Receive the events.
    """
    prefixes = resources.prefixes
    new_batch = partial(Batch, model.network, fresh_caches, model.card.vocab_size)
    scheduler = _make_scheduler(fresh_caches.plan, tuning)
    publisher = Publisher(outlets.hand_over, tuning.scheduling.max_replies_per_s)
    memory = MemoryWatch(resources.reservations, scheduler, prefixes)
    requests = OpenRequests(scheduler, memory, prefixes, publisher)
    feeder = make_feeder(model.network, fresh_caches)
    counters = Counters()
    new_drafting = partial(_make_drafting, model, fresh_caches.plan, tuning, counters, resources)
    drafting = new_drafting()
    batch = new_batch(drafting)
    background = BackgroundJobs(tuning.scheduling.prefill_chunk, tuning.scheduling.side_share)
    pacer = _make_pacer(tuning)
    isolation = Isolation(feeder, new_batch)
    recovery = Recovery(requests, scheduler, memory, batch, isolation, publisher)
    recovery.note_pass = outlets.note_pass
    prefilling = Prefilling(feeder, prefixes, pacer, counters, fresh_caches.plan, drafting)
    adoption = Adoption(fresh_caches.plan, scheduler, memory, batch, prefilling, prefixes)
    delivery = Delivery(requests, prefixes, publisher, counters)
    decoding = Decoding(batch, scheduler, memory, requests, recovery, delivery)
    decoding.adapt(resources.threads)
    return DecoderParts(
        prefixes=prefixes,
        scheduler=scheduler,
        publisher=publisher,
        memory=memory,
        requests=requests,
        background=background,
        job_factory=JobFactory(model, fresh_caches, prefixes, background),
        pacer=pacer,
        batch=batch,
        recovery=recovery,
        prefilling=prefilling,
        decoding=decoding,
        counters=counters,
        draft_bytes=resources.draft_bytes,
        adoption=adoption,
        examination=_make_examination(resources, tuning, adoption, new_drafting),
    )


def _make_examination(
    resources: Resources,
    tuning: TuningOptions,
    adoption: Adoption,
    new_drafting: Callable[[], Drafting | None],
) -> Examination:
    return Examination(
        resources.trials,
        resources.page,
        adopt=lambda found: adoption.adopt(found, new_drafting),
        knows_drafts=tuning.speculation.speculation != "off",
    )


def _make_drafting(
    model: RunnableModel,
    plan: BatchPlan,
    tuning: TuningOptions,
    counters: Counters,
    resources: Resources,
) -> Drafting | None:
    """Return the drafting of a batch, if it is enabled and the model supports it."""
    if not plan.pass_seconds:
        return None
    costs, vocab_size = PassCosts(plan.pass_seconds), model.card.vocab_size
    writer = resources.draft.batch(vocab_size) if resources.draft else None
    return Drafting(costs, counters, vocab_size, tuning.speculation, writer)


def _make_scheduler(plan: BatchPlan, tuning: TuningOptions) -> Scheduler:
    slots = tuning.scheduling.max_slots
    return Scheduler(max_slots=slots, max_active=slots if plan.batches else 1)


def _make_pacer(tuning: TuningOptions) -> PrefillPacer:
    return PrefillPacer(
        cap=tuning.scheduling.prefill_chunk,
        cap_alone=tuning.scheduling.prefill_chunk_alone,
        pause_s=tuning.scheduling.prefill_pause_ms / 1000.0,
    )
