"""Loads the drafter of a model, a draft model or a head, and checks whether it can draft."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from backend.config import ModelOptions
from backend.core.model import ModelCard, ModelKind
from backend.engine.drafts.pricing import DraftModel, PassCosts
from backend.engine.findings import Notebook, Page
from backend.engine.kv.batch_caches import BatchCaches
from backend.engine.passes.caches import CacheFactory
from backend.engine.passes.draft_batch import DraftBatch, HeadBatch
from backend.engine.passes.state_batch import BATCHES
from backend.engine.plan import Batching, BatchPlan
from backend.engine.rows.admission import KvProfile
from backend.engine.rows.row import MOST_TOKENS
from backend.engine.trials.batch_check import BatchTrial, planning
from backend.engine.trials.model_key import files_digest, model_key
from backend.engine.trials.pass_costs import foresee, measured_probe_seconds
from backend.engine.trials.trial_steps import PROBE_TOKENS, at_once, require_sense
from backend.errors import LoadError, UnsupportedModelError
from backend.model.checkpoint.config_file import asks_for_several, draft_options
from backend.model.checkpoint.extras import no_mtp_head
from backend.model.checkpoint.gate import named
from backend.model.checkpoint.weights import (
    MakeRoom,
    evaluate,
    memory_bytes,
    need_no_room,
    require_memory,
    weights_bytes,
)
from backend.model.heads import (
    HeadKind,
    HeadNetwork,
    HeadWeights,
    HiddenTap,
    StateReader,
    build_head,
    head_alone,
    head_beside,
)
from backend.model.loaded import RunnableModel
from backend.model.loader import load, look
from backend.model.text.tokenizer import Tokenizer

# The draft model must know at least this share of the model's tokens.
_LEAST_SHARE = 0.9


Found = TypeVar("Found")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model, ready to draft."""

    model: RunnableModel
    fresh_caches: CacheFactory
    profile: KvProfile

    def batch(self, vocab_size: int) -> DraftModel:
        """Return the drafter for the batches of a model."""
        return DraftBatch(
            self.model.network,
            self.fresh_caches,
            PassCosts(self.fresh_caches.plan.pass_seconds),
            own_vocab_size=self.model.card.vocab_size,
            vocab_size=vocab_size,
        )


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The inputs of a drafter's load and trials, besides its options and the model.

    Attributes:
        make_room: Called with the size of both weights before those of the drafter are read.
    """

    sample: Sequence[int]
    make_room: MakeRoom = need_no_room
    notebook: Notebook = field(default_factory=Notebook)


def load_draft_model(
    own: ModelOptions, model: RunnableModel, surroundings: Surroundings
) -> LoadedDraft:
    """Return a draft model."""
    draft = load(
        own,
        Path(own.model),
        renders=False,
        make_room=surroundings.make_room,
        beside_bytes=model.card.weights_bytes,
    )
    page = surroundings.notebook.page(model_key(own, draft))
    return _examined(draft, model, surroundings.sample, page)


def foresee_draft_model(own: ModelOptions, model: RunnableModel) -> tuple[ModelCard, KvProfile]:
    """Return the card and memory profile of `load_draft_model`'s result without reading weights."""
    draft = look(own, Path(own.model), renders=False)
    _require_decoder(draft)
    require_same_vocabulary(draft.tokenizer, model.tokenizer)
    _require_positions(draft)
    return draft.card, foresee(draft.network, CacheFactory(draft.network))


def _examined(
    draft: RunnableModel, model: RunnableModel, sample: Sequence[int], page: Page
) -> LoadedDraft:
    _require_decoder(draft)
    require_same_vocabulary(draft.tokenizer, model.tokenizer)
    known = [token_id for token_id in sample if token_id < draft.card.vocab_size] or [0]
    fresh_caches = CacheFactory(draft.network)
    if not page.findings.is_sound:
        require_sense(draft.network, fresh_caches, known[:PROBE_TOKENS])
        page.add(is_sound=True)
    return look_at_draft(draft, known, page, batches=model.card.batches)


def _require_decoder(draft: RunnableModel) -> None:
    if draft.card.kind is not ModelKind.DECODER:
        kind, name = draft.card.kind.value, draft.card.path
        raise UnsupportedModelError(f"{name} is of the kind {kind}: it generates nothing")


def look_at_draft(
    draft: RunnableModel, sample: Sequence[int], page: Page | None = None, *, batches: bool
) -> LoadedDraft:
    """Measure the passes of a draft model, and check that its rows can go back.

    Args:
        batches: Whether it must draft for several rows at once.

    Raises:
        UnsupportedModelError: Its rows cannot go back.
    """
    _require_positions(draft)
    fresh_caches = CacheFactory(draft.network)
    page = page or Page()
    plan = page.findings.plan
    if plan is None or not page.findings.knows_drafts:
        trial = BatchTrial(draft.network, fresh_caches, sample)
        plan = at_once(planning(trial, page, drafts=True))
        page.add(plan=plan, knows_drafts=True)
        page.hand_over()
    if not plan.pass_seconds or (batches and plan.batching is Batching.NONE):
        raise UnsupportedModelError(
            f"{draft.card.path} ({draft.card.model_type}) cannot draft: its rows cannot take "
            "several tokens in a pass, and give some back, as they would by themselves"
        )
    # Its caches never meet the prompt cache; a head reads the states of padded rows.
    plan = replace(plan, shares_prefixes=False, packs=False)
    fresh_caches = replace(fresh_caches, plan=plan)
    profile = replace(foresee(draft.network, fresh_caches), has_own_lengths=plan.has_own_lengths)
    return LoadedDraft(draft, fresh_caches, profile)


def _require_positions(draft: RunnableModel) -> None:
    caches = BatchCaches(BatchPlan())
    caches.regroup([], [CacheFactory(draft.network)()])
    if not caches.keeps_positions:
        raise UnsupportedModelError(
            f"{draft.card.path} ({draft.card.model_type}) cannot draft: it has windows or "
            "recurrent layers, which cannot go back to where a draft was wrong"
        )


def require_same_vocabulary(draft: Tokenizer, model: Tokenizer) -> None:
    """Refuse a draft model whose tokens mean something else.

    Special tokens may differ: instructions are marked in many ways, and are rarely drafted.

    Raises:
        LoadError: The vocabularies differ; the message gives a token, or the number of shared ones.
    """
    special = draft.special_ids | model.special_ids
    theirs = {i: text for text, i in draft.vocabulary.items() if i not in special}
    ours = {i: text for text, i in model.vocabulary.items() if i not in special}
    both = theirs.keys() & ours.keys()
    wrong = sorted(token_id for token_id in both if theirs[token_id] != ours[token_id])
    if wrong:
        first = wrong[0]
        raise LoadError(
            f"it has another vocabulary than the model: {len(wrong)} of {len(both)} tokens are "
            f"others; {first} is {theirs[first]!r} and not {ours[first]!r}"
        )
    if len(both) < _LEAST_SHARE * len(ours):
        raise LoadError(
            f"it has another vocabulary than the model: {len(both)} of {len(ours)} tokens are there"
        )


@dataclass(frozen=True, slots=True)
class LoadedHead(LoadedDraft):
    """A head, ready to draft."""

    tap: HiddenTap

    def batch(self, vocab_size: int) -> DraftModel:
        """Return the drafter for the batches of the model."""
        network, costs = self.model.network, PassCosts(self.fresh_caches.plan.pass_seconds)
        if make := BATCHES.get(type(network)):
            return make(network, self.tap, costs, vocab_size=vocab_size)
        return HeadBatch(network, self.tap, self.fresh_caches, costs, vocab_size=vocab_size)


def load_head(
    kind: HeadKind,
    directory: Path,
    own: ModelOptions,
    model: RunnableModel,
    surroundings: Surroundings,
) -> LoadedHead:
    """Return the head in a directory of its own, or in that of the checkpoint that contains it."""
    head = build_head(kind, directory, model.network, _form(own))
    needed, own_bytes = weights_bytes(head), model.card.weights_bytes
    require_memory(needed, memory_bytes() - own_bytes)
    surroundings.make_room(own_bytes + needed)
    evaluate(head)
    part = replace(model, network=head, card=_card(kind, directory, model, needed))
    if not isinstance(head, HeadNetwork):
        return look_at_reader(part, head)
    page = surroundings.notebook.page(
        f"{model_key(own, model)}-{kind.name}-{files_digest(directory)}"
    )
    look = look_at_draft(part, surroundings.sample, page, batches=model.card.batches)
    profile = _with_states(look.profile, head)
    return LoadedHead(look.model, look.fresh_caches, profile, HiddenTap(head.tapped))


def _form(own: ModelOptions) -> HeadWeights:
    return HeadWeights(own.dtype, own.tuning.checkpoint.dequantize)


def look_at_reader(part: RunnableModel, head: StateReader) -> LoadedHead:
    """Measure the passes of a drafter that has no tokens of its own."""
    plan = BatchPlan(pass_seconds=measured_probe_seconds(head.probe))
    fresh_caches = CacheFactory(part.network, plan=plan)
    return LoadedHead(part, fresh_caches, _reader_profile(head), HiddenTap(head.tapped))


def _reader_profile(head: StateReader) -> KvProfile:
    profile = KvProfile(bytes_per_token=head.kept_bytes, has_own_lengths=True)
    return _with_states(profile, head)


def foresee_head(
    kind: HeadKind, directory: Path, own: ModelOptions, model: RunnableModel
) -> tuple[ModelCard, KvProfile]:
    """Return the card and memory profile of `load_head`'s result without reading weights."""
    head = build_head(kind, directory, model.network, _form(own))
    card = _card(kind, directory, model, weights_bytes(head))
    if not isinstance(head, HeadNetwork):
        return card, _reader_profile(head)
    return card, _with_states(foresee(head, CacheFactory(head)), head)


def _with_states(profile: KvProfile, head: StateReader) -> KvProfile:
    """Add the states of the model that a row keeps until the head has read them."""
    states_bytes = MOST_TOKENS * head.token_bytes
    return replace(profile, fixed_bytes=profile.fixed_bytes + states_bytes)


def _card(kind: HeadKind, directory: Path, model: RunnableModel, own_bytes: int) -> ModelCard:
    return replace(model.card, path=str(directory), model_type=kind.name, weights_bytes=own_bytes)


def load_draft(
    options: ModelOptions,
    model: RunnableModel,
    sample: Sequence[int],
    make_room: MakeRoom = need_no_room,
    notebook: Notebook | None = None,
) -> LoadedDraft | None:
    """Return the drafter named by the options, else the head in the model's checkpoint, if any.

    Args:
        options: The options of the LoadModel, with the directory of the draft model.
        make_room: Called with the size of both weights before those of the drafter are read.

    Raises:
        LoadError: It cannot be loaded alongside the model, or cannot draft for it.
    """
    surroundings = Surroundings(sample, make_room, notebook or Notebook())
    loaded = _found(
        options,
        model,
        lambda own: load_draft_model(own, model, surroundings),
        lambda kind, directory: load_head(kind, directory, options, model, surroundings),
    )
    if loaded is not None:
        part = loaded.model.card
        size_gb = part.weights_bytes / 1e9
        log.info("%s (%s, %.2f GB) drafts", part.path, part.model_type, size_gb)
        _tell_order(options, model)
    return loaded


def _tell_order(options: ModelOptions, model: RunnableModel) -> None:
    """Log which of several sources of drafts are used, and why."""
    if options.tuning.speculation.speculation == "auto":
        log.info("it drafts where a request's grammar and text do not: their drafts cost no pass")
    own = draft_options(options)
    beside = head_beside(Path(model.card.path)) if own is not None else None
    if own is not None and beside is not None:
        log.info("the %s in %s does not draft: draft_model wins", beside.name, model.card.path)


def wants_drafter(options: ModelOptions, model: RunnableModel) -> bool:
    """Tell whether a drafter is to be loaded with a model; a wrong one too."""
    if draft_options(options) is not None:
        return True
    if not _may_have_head(options):
        return False
    try:
        has_own = head_beside(Path(model.card.path)) is not None
    except LoadError:
        return True
    return has_own or options.tuning.speculation.speculation == "mtp"


def names_drafter(options: ModelOptions) -> bool:
    """Tell whether the options name a drafter; a head of the checkpoint may draft without."""
    if draft_options(options) is not None:
        return True
    return options.tuning.speculation.speculation == "mtp" and not asks_for_several(options)


def foresee_draft(
    options: ModelOptions, model: RunnableModel
) -> tuple[ModelCard, KvProfile] | None:
    """Return the card and memory profile of `load_draft`'s result without reading weights.

    Raises:
        LoadError: It cannot be loaded, or cannot draft for the model.
    """
    return _found(
        options,
        model,
        lambda own: foresee_draft_model(own, model),
        lambda kind, directory: foresee_head(kind, directory, options, model),
    )


def _found(
    options: ModelOptions,
    model: RunnableModel,
    take_model: Callable[[ModelOptions], Found],
    take_head: Callable[[HeadKind, Path], Found],
) -> Found | None:
    own = draft_options(options)
    if own is None:
        return _own_head(options, model, take_head)
    directory = Path(own.model)
    with named("draft_model"):
        if kind := head_alone(directory):
            return take_head(kind, directory)
        if options.tuning.speculation.speculation == "mtp":
            raise UnsupportedModelError(f"{directory} is no head, and speculation is mtp")
        return take_model(own)


def _own_head(
    options: ModelOptions, model: RunnableModel, take_head: Callable[[HeadKind, Path], Found]
) -> Found | None:
    """Return the head of the model's own checkpoint; it must exist only if requested."""
    wanted, directory = options.tuning.speculation.speculation, Path(model.card.path)
    if not _may_have_head(options):
        return None
    try:
        if kind := head_beside(directory):
            return take_head(kind, directory)
        if wanted == "mtp":
            raise no_mtp_head(directory)
    except LoadError as error:
        if wanted == "mtp":
            raise type(error)(str(error), field="speculation") from error
        log.warning("the MTP head of %s is not used: %s", model.card.name, error)
    return None


def _may_have_head(options: ModelOptions) -> bool:
    """Tell whether the options allow a head of the model's own checkpoint."""
    wanted = options.tuning.speculation.speculation
    return wanted in ("auto", "mtp") and not asks_for_several(options)
