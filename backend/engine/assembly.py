"""Put a session together around a model that was just loaded."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from backend.cache.packing import Packing
from backend.config import PROMPT_CACHE_MEMORY_SHARE, ModelOptions, TuningOptions
from backend.core.model import ModelCard
from backend.engine.caches import make_cache_factory
from backend.engine.command import Fetched
from backend.engine.disk_link import DiskSettings
from backend.engine.keeper import Keeper, make_keeper
from backend.engine.network import FreshCaches
from backend.engine.publisher import HandOver
from backend.engine.selfcheck import batching_fault
from backend.engine.session import Session
from backend.model.fingerprint import fingerprint
from backend.model.loaded import RunnableModel
from backend.model.weights import memory_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outlets:
    """Where a session puts what it has for others.

    Attributes:
        hand_over: Takes the events of all requests, in order; must not block.
        post: Takes what another thread has for this session.
    """

    hand_over: HandOver
    post: Callable[[Fetched], None]


def assemble_session(model: RunnableModel, options: ModelOptions, outlets: Outlets) -> Session:
    """Return an idle session, after a look at what the model can do."""
    tuning = options.tuning
    fresh_caches = make_cache_factory(model.network, tuning)
    batches = tuning.batching and _is_batchable(model, fresh_caches)
    model = replace(model, card=replace(model.card, batches=batches))
    keeper = _keeper(model.card, fresh_caches, options, outlets.post)
    return Session(model, fresh_caches, keeper, tuning, outlets.hand_over)


def _is_batchable(model: RunnableModel, fresh_caches: FreshCaches) -> bool:
    fault = batching_fault(model.network, fresh_caches, model.card.vocab_size)
    if fault is not None:
        log.warning("this model runs one request at a time: %s", fault)
    return fault is None


def _keeper(
    card: ModelCard,
    fresh_caches: FreshCaches,
    options: ModelOptions,
    post: Callable[[Fetched], None],
) -> Keeper:
    tuning = options.tuning
    disk = DiskSettings(
        root=Path(tuning.cache_dir).expanduser() if tuning.cache_dir else None,
        models_dir=options.models_dir,
        fingerprint=fingerprint(options, Path(card.path)),
        budget_bytes=tuning.max_cache_disk_bytes,
        post=post,
    )
    budget_bytes = _memory_budget_bytes(tuning, card)
    return make_keeper(fresh_caches, budget_bytes, Packing(tuning.cache_bits), disk)


def _memory_budget_bytes(tuning: TuningOptions, card: ModelCard) -> int:
    if tuning.max_cache_bytes is not None:
        return tuning.max_cache_bytes
    free = max(memory_bytes() - card.weights_bytes, 0)
    return int(PROMPT_CACHE_MEMORY_SHARE * free)
