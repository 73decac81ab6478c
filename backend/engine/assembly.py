"""Put a session together around a model that was just loaded."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from backend.cache.packing import Packing
from backend.config import (
    MEDIA_MEMO_BYTES,
    PREPARED_MEDIA_BYTES,
    PROMPT_CACHE_MEMORY_SHARE,
    ModelOptions,
    TuningOptions,
)
from backend.core.model import ModelKind
from backend.engine.admission import KvProfile, Reservations
from backend.engine.caches import make_cache_factory
from backend.engine.command import Fetched, GroupNews
from backend.engine.disk_link import DiskSettings
from backend.engine.encoder_session import EncoderSession
from backend.engine.keeper import Keeper, make_keeper
from backend.engine.kv_profile import measure
from backend.engine.memory_budget import kv_budget_bytes, working_set_bytes
from backend.engine.network import FreshCaches
from backend.engine.publisher import HandOver
from backend.engine.selfcheck import batching_fault, require_numbers
from backend.engine.session import Session
from backend.model.fingerprint import fingerprint
from backend.model.loaded import RunnableModel

_EXAMPLE_TOKENS = 4096

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outlets:
    """Where a session puts what it has for others.

    Attributes:
        hand_over: Takes the events of all requests, in order; must not block.
        post: Takes what another thread has for this session.
    """

    hand_over: HandOver
    post: Callable[[Fetched | GroupNews], None]


def assemble_session(
    model: RunnableModel, options: ModelOptions, outlets: Outlets
) -> Session | EncoderSession:
    """Return an idle session, after a look at what the model can do."""
    if model.card.kind is not ModelKind.DECODER:
        return EncoderSession(model, outlets.hand_over)
    return assemble_decoder_session(model, options, outlets)


def assemble_decoder_session(
    model: RunnableModel, options: ModelOptions, outlets: Outlets
) -> Session:
    """Return an idle session of a model that generates."""
    tuning = options.tuning
    fresh_caches = make_cache_factory(model.network, tuning)
    require_numbers(model.network, fresh_caches)
    batches = tuning.batching and _is_batchable(model, fresh_caches)
    model = replace(model, card=replace(model.card, batches=batches))
    budget_bytes = kv_budget_bytes(
        options,
        model.card.weights_bytes,
        working_set_bytes(),
        media_bytes=MEDIA_MEMO_BYTES + PREPARED_MEDIA_BYTES if model.media else 0,
    )
    keeper = _keeper(Path(model.card.path), fresh_caches, options, budget_bytes, outlets.post)
    profile = measure(model.network, fresh_caches)
    _tell(profile, budget_bytes)
    reservations = Reservations(profile, budget_bytes, tuning.expected_tokens)
    return Session(model, fresh_caches, keeper, reservations, tuning, outlets.hand_over)


def _tell(profile: KvProfile, budget_bytes: int) -> None:
    log.info(
        "there are %.2f GiB for KV caches; one of %d tokens takes %.1f MiB",
        budget_bytes / 2**30,
        _EXAMPLE_TOKENS,
        profile.row_bytes(_EXAMPLE_TOKENS) / 2**20,
    )


def _is_batchable(model: RunnableModel, fresh_caches: FreshCaches) -> bool:
    fault = batching_fault(model.network, fresh_caches, model.card.vocab_size)
    if fault is not None:
        log.warning("this model runs one request at a time: %s", fault)
    return fault is None


def _keeper(
    directory: Path,
    fresh_caches: FreshCaches,
    options: ModelOptions,
    kv_budget_bytes: int,
    post: Callable[[Fetched], None],
) -> Keeper:
    tuning = options.tuning
    disk = DiskSettings(
        root=Path(tuning.cache_dir).expanduser() if tuning.cache_dir else None,
        models_dir=options.models_dir,
        fingerprint=fingerprint(options, directory),
        budget_bytes=tuning.max_cache_disk_bytes,
        post=post,
    )
    return make_keeper(
        fresh_caches, prompt_cache_bytes(tuning, kv_budget_bytes), Packing(tuning.cache_bits), disk
    )


def prompt_cache_bytes(tuning: TuningOptions, kv_budget_bytes: int) -> int:
    """Return what the prompt cache may take of what there is for KV caches."""
    if tuning.max_cache_bytes is not None:
        return tuning.max_cache_bytes
    return int(PROMPT_CACHE_MEMORY_SHARE * kv_budget_bytes)
