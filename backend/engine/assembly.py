"""Loads a model, and assembles its loop."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from backend.cache.kv import Packing, Size
from backend.config import (
    MEDIA_BYTES,
    PROMPT_CACHE_ARRAY_SHARE,
    PROMPT_CACHE_MEMORY_SHARE,
    ModelOptions,
    TuningOptions,
)
from backend.core.model import ModelCard, ModelKind
from backend.engine.encoder_loop import Encoder, EncoderLoop
from backend.engine.findings import Notebook, Page
from backend.engine.loop import EngineLoop
from backend.engine.parts import Resources
from backend.engine.passes.agreement import ALONE, Ranks
from backend.engine.passes.caches import CacheFactory, make_cache_factory
from backend.engine.plan import Batching, BatchPlan, FreshCaches
from backend.engine.port import Port
from backend.engine.prefix_store import DiskSettings, PrefixStore
from backend.engine.rows.admission import (
    KvProfile,
    Reservations,
    kv_budget_bytes,
    pass_bytes,
    working_set_bytes,
)
from backend.engine.trials.batch_check import BatchTrial, Planning, planning
from backend.engine.trials.draft_model import (
    LoadedDraft,
    foresee_draft,
    load_draft,
    names_drafter,
    wants_drafter,
)
from backend.engine.trials.media_check import media_faults, text_fault
from backend.engine.trials.model_key import model_key
from backend.engine.trials.pass_costs import foresee, foresee_kv
from backend.engine.trials.trial_steps import (
    PROBE_TOKENS,
    at_once,
    require_numbers,
    require_sense,
    trial_lengths,
)
from backend.errors import UnsupportedModelError
from backend.model.checkpoint.gate import fingerprint
from backend.model.checkpoint.upstream import is_known_to_mlx_lm
from backend.model.checkpoint.weights import MakeRoom, need_no_room, weight_types
from backend.model.device import DEVICE
from backend.model.loaded import RunnableModel
from backend.model.loader import look, prepare, read
from backend.model.text.isolated.template_pool import PROCESSES
from backend.model.vision.media_support import Examiner
from backend.model.vision.vision_network import VisionNetwork
from common.machine_memory import in_words

_EXAMPLE_TOKENS = 4096
# A longer prompt takes seconds to compute.
_LONGEST_TRIED_SPAN = 2048
_SAMPLE_TEXT = """\
The harbour was quiet before dawn. Three boats, two of them painted blue, lay side by side, and \
a gull walked along the wall as if it had counted every stone. "How much for the smallest?" she \
asked; he said 1,250, then shook his head: no, 980 would do.
"""

log = logging.getLogger(__name__)


def look_whole(options: ModelOptions, directory: Path) -> RunnableModel:
    """Return a model for this process alone, whose weights have yet to be read.

    Raises:
        LoadError: Explains the problem in the user's terms.
    """
    model = look(options, directory, renders=False)
    prepare(model, options)
    if model.card.kind is ModelKind.DECODER:
        _require_room(options, model)
    return model


def _require_room(options: ModelOptions, model: RunnableModel) -> None:
    """Refuse a drafter that cannot draft for the model, and memory without room for requests."""
    draft, beside = None, 0
    if options.tuning.scheduling.batching and names_drafter(options):
        card, draft = foresee_draft(options, model) or (None, None)
        beside = card.weights_bytes if card else 0
    own = foresee_kv(model.network, options.tuning)
    own = own or foresee(model.network, CacheFactory(model.network))
    budget_bytes, _ = _kv_budget_bytes(options, model, beside)
    profile = replace(own, draft=draft)
    expected = options.tuning.memory.expected_tokens
    Reservations(profile, budget_bytes, expected).require_room(options)


def read_whole(
    model: RunnableModel, options: ModelOptions, make_room: MakeRoom = need_no_room
) -> RunnableModel:
    """Return a model after reading its weights.

    Args:
        make_room: Told their size before.
    """
    set_wired_limit(options)
    return read(model, make_room=make_room)


def set_wired_limit(options: ModelOptions) -> None:
    """Have MLX keep so much memory resident, if the options say so."""
    if (wired_mb := options.tuning.memory.wired_limit_mb) > 0:
        mx.set_wired_limit(wired_mb * 2**20)


def assemble_any_loop(
    model: RunnableModel,
    options: ModelOptions,
    port: Port,
    notebook: Notebook,
    make_room: MakeRoom = need_no_room,
) -> EngineLoop | EncoderLoop:
    """Return the idle loop of a model of any kind; the arguments are those of `assemble_loop`."""
    if model.card.kind is ModelKind.DECODER:
        loop = assemble_loop(model, options, port, notebook, make_room)
        loop.memory.reservations.require_room(options)
        return loop
    DEVICE.choose_threads(options.threads)
    page = notebook.page(model_key(options, model))
    if not page.findings.is_sound:
        require_numbers(Encoder(model.network).look(_sample(model)[:PROBE_TOKENS]))
        page.add(is_sound=True)
        page.hand_over()
    return EncoderLoop(model, port)


def assemble_loop(
    model: RunnableModel,
    options: ModelOptions,
    port: Port,
    notebook: Notebook,
    make_room: MakeRoom = need_no_room,
    ranks: Ranks = ALONE,
) -> EngineLoop:
    """Return the idle loop of a model that generates, after checking its abilities.

    Args:
        make_room: Told the size of a draft model's weights before they are read.
    """
    tuning = options.tuning
    # Ranks on one machine share its cores.
    threads = None if ranks.are_several else DEVICE.choose_threads(options.threads)
    page = notebook.page(model_key(options, model))
    page.repeat()
    before = page.findings
    sample = _sample(model)
    fresh_caches = make_cache_factory(model.network, tuning, ranks, before.group_sizes)
    page.add(group_sizes=fresh_caches.group_sizes)
    if not before.is_sound:
        require_sense(model.network, fresh_caches, sample[:PROBE_TOKENS])
        page.add(is_sound=True)
    if isinstance(model.network, VisionNetwork):
        model = _with_checked_media(model, model.network, fresh_caches, sample, page)
        # Only trials of media render here; prompts are rendered in the server.
        PROCESSES.close()
    batching = _Batching(model, options, fresh_caches, sample, ranks, page)
    plan = batching.plan()
    if page.findings != before:
        page.hand_over()
    fresh_caches = replace(fresh_caches, plan=plan)
    model = replace(model, card=replace(model.card, batches=plan.batches))
    draft = None
    if plan.pass_seconds and (draft := load_draft(options, model, sample, make_room, notebook)):
        model = replace(model, card=replace(model.card, draft_model=draft.model.card.path))
    beside = draft.model.card.weights_bytes if draft else 0
    budget_bytes, free_bytes = _kv_budget_bytes(options, model, beside)
    cache_size = Size(
        prompt_cache_bytes(tuning, budget_bytes), prompt_cache_arrays(model, draft, ranks)
    )
    disk = _disk_settings(model, options, port)
    packing, several = Packing(tuning.prompt_cache.cache_bits), ranks.are_several
    prefixes = PrefixStore(fresh_caches, cache_size, packing, disk, is_replicated=several)
    model = replace(model, card=replace(model.card, reuse=prefixes.reuse))
    profile = _profile(model, fresh_caches, draft)
    _log_memory(profile, budget_bytes)
    # Ranks must cut prompts the same, but not all have the same memory.
    room = math.inf if several else free_bytes
    reservations = Reservations(profile, budget_bytes, tuning.memory.expected_tokens, room)
    trials = batching.planning if batching.is_open else None
    resources = Resources(prefixes, reservations, draft, trials, page, threads)
    return EngineLoop(model, fresh_caches, resources, tuning, port)


@dataclass(slots=True)
class _Batching:
    """How the rows of a model may be batched: known, tried now, or to be tried later.

    Attributes:
        is_open: Whether it has yet to be tried, once the plan was asked for.
    """

    model: RunnableModel
    options: ModelOptions
    fresh_caches: CacheFactory
    sample: Sequence[int]
    ranks: Ranks
    page: Page
    is_open: bool = False

    @property
    def _drafts(self) -> bool:
        return self.options.tuning.speculation.speculation != "off"

    def plan(self) -> BatchPlan:
        """Return the plan to start with: if it has yet to be tried, a safe one."""
        if not self.options.tuning.scheduling.batching:
            return BatchPlan(Batching.NONE)
        known = self.page.findings
        if known.plan is not None and (known.knows_drafts or not self._drafts):
            return replace(known.plan, pass_seconds=known.plan.pass_seconds if self._drafts else {})
        if self._must_wait:
            log.info(
                "trying how requests of %s can be computed together, once for this checkpoint: "
                "this takes some seconds on a CPU",
                self.model.card.name,
            )
            plan = at_once(self.planning())
            self.page.add(plan=plan, knows_drafts=self._drafts, begun=0)
            return replace(plan)
        self.is_open = not self.page.has_failed
        if self.page.has_failed:
            log.warning(
                "this model runs one request at a time, without drafts: engines have ended while "
                "they tried more (check_at_load:true tries again)"
            )
        return replace(known.plan) if known.plan else BatchPlan(Batching.NONE, starts_early=True)

    @property
    def _must_wait(self) -> bool:
        """Whether the load has to wait: ranks act alike, and a drafter is refused at load."""
        at_load = self.options.tuning.process.check_at_load or self.ranks.are_several
        return at_load or (self._drafts and wants_drafter(self.options, self.model))

    def planning(self) -> Planning:
        """Return the trials; the log tells the windows that they leave out."""
        spans = [n for n in self.model.card.attention_spans if n <= _LONGEST_TRIED_SPAN]
        if len(spans) < len(self.model.card.attention_spans):
            text = "windows of more than %d tokens are not tried"
            self.page.say(logging.INFO, text, _LONGEST_TRIED_SPAN)
        network, lengths = self.model.network, trial_lengths(spans)
        trial = BatchTrial(network, self.fresh_caches, self.sample, lengths, ranks=self.ranks)
        known = self.page.findings.plan
        return planning(trial, self.page, drafts=self._drafts, known=known)


def _kv_budget_bytes(
    options: ModelOptions, model: RunnableModel, beside_bytes: int
) -> tuple[int, int]:
    """Return the memory for KV caches after the weights, and the bytes kept free for a pass.

    Args:
        beside_bytes: Size of a drafter's weights.
    """
    weights = model.card.weights_bytes + beside_bytes
    media = MEDIA_BYTES if model.media else 0
    working_set = working_set_bytes()
    budget = kv_budget_bytes(options, weights, working_set, media_bytes=media)
    return budget, pass_bytes(options, weights + media, working_set, budget)


def _profile(
    model: RunnableModel, fresh_caches: CacheFactory, draft: LoadedDraft | None
) -> KvProfile:
    return replace(
        foresee(model.network, fresh_caches),
        has_own_lengths=fresh_caches.plan.has_own_lengths,
        draft=draft.profile if draft else None,
    )


def _log_memory(profile: KvProfile, budget_bytes: int) -> None:
    log.info(
        "up to %s are for KV caches; one of %s tokens takes %s",
        in_words(budget_bytes),
        f"{_EXAMPLE_TOKENS:,}",
        in_words(profile.row_bytes(_EXAMPLE_TOKENS)),
    )


def _with_checked_media(
    model: RunnableModel,
    network: VisionNetwork,
    fresh_caches: FreshCaches,
    sample: Sequence[int],
    page: Page,
) -> RunnableModel:
    """Return the model with the media that it reads correctly; text it must."""
    known = page.findings
    if not known.reads_text or (model.media and not known.media):
        log.info(
            "trying whether %s reads text and media as mlx-vlm does, once for this checkpoint: "
            "this takes some seconds on a CPU",
            model.card.name,
        )
    if not known.reads_text:
        if fault := text_fault(network, fresh_caches, sample):
            raise UnsupportedModelError(_text_refusal(model.card, fault))
        page.add(reads_text=True)
    if model.media is None:
        return model
    found = known.media
    if found is None:
        examiner = Examiner(model.media, model.tokenizer, model.template)
        found = media_faults(network, fresh_caches, examiner, page)
        page.add(media=found)
    refused = {**model.card.refused_media, **found.refused}
    card = replace(model.card, refused_media=refused, single_media=found.single)
    media = model.media.without(found.refused)
    kinds = ", ".join(kind.value for kind in media.snippets) if media else "none"
    log.info("media that can be read: %s", kinds)
    return replace(model, card=card, media=media)


def _text_refusal(card: ModelCard, fault: str) -> str:
    reasons = [fault, *(f"{kind.value}: {why}" for kind, why in card.refused_media.items())]
    advice = ""
    if is_known_to_mlx_lm({"model_type": card.model_type}):
        advice = "; the option vision:false loads its text part by mlx-lm"
    return (
        f"{card.path} is of the model type {card.model_type!r}, which this backend cannot serve, "
        f"not even with text alone: {'; '.join(reasons)}{advice}"
    )


def _sample(model: RunnableModel) -> Sequence[int]:
    """Return tokens of natural text: vocabulary rows that no text uses may be empty."""
    ids = model.tokenizer.encode(_SAMPLE_TEXT, adds_special=False)
    return [token_id for token_id in ids if token_id < model.card.vocab_size] or [0]


def _disk_settings(model: RunnableModel, options: ModelOptions, port: Port) -> DiskSettings:
    cache = options.tuning.prompt_cache
    return DiskSettings(
        root=Path(cache.cache_dir).expanduser() if cache.cache_dir else None,
        models_dir=options.models_dir,
        fingerprint=fingerprint(options, Path(model.card.path), weight_types(model.network)),
        budget_bytes=cache.max_cache_disk_bytes,
        post=port.post,
    )


def prompt_cache_bytes(tuning: TuningOptions, kv_budget_bytes: int) -> int:
    """Return the prompt cache's share of the memory for KV caches."""
    if tuning.prompt_cache.max_cache_bytes is not None:
        return tuning.prompt_cache.max_cache_bytes
    return int(PROMPT_CACHE_MEMORY_SHARE * kv_budget_bytes)


def prompt_cache_arrays(
    model: RunnableModel, draft: LoadedDraft | None = None, ranks: Ranks = ALONE
) -> float:
    """Return the prompt cache's share of the arrays that the device can hold besides weights.

    Ranks have different numbers of weights and layers, but must evict the same: none is limited.
    """
    if math.isinf(DEVICE.max_arrays) or ranks.are_several:
        return math.inf
    models = [model, draft.model] if draft else [model]
    weights = sum(len(tree_flatten(each.network.parameters())) for each in models)
    return max(PROMPT_CACHE_ARRAY_SHARE * (DEVICE.max_arrays - weights), 0)
