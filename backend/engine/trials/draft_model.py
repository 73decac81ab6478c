"""Loads a draft model, and checks whether it can draft for the model."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from backend.config import ModelOptions
from backend.core.model import ModelCard, ModelKind
from backend.engine.drafts.pricing import PassCosts
from backend.engine.findings import Notebook, Page
from backend.engine.kv.batch_caches import BatchCaches
from backend.engine.passes.caches import CacheFactory
from backend.engine.passes.draft_batch import DraftBatch
from backend.engine.plan import Batching, BatchPlan
from backend.engine.rows.admission import KvProfile
from backend.engine.trials.batch_check import BatchTrial, planning
from backend.engine.trials.kv_profile import foresee
from backend.engine.trials.model_key import model_key
from backend.engine.trials.self_check import require_sense
from backend.engine.trials.trial_steps import at_once
from backend.errors import LoadError, UnsupportedModelError
from backend.model.checkpoint.weights import MakeRoom, need_no_room
from backend.model.loaded import RunnableModel
from backend.model.loader import load, look
from backend.model.text.tokenizer import Tokenizer

_PROBE_TOKENS = 8
# The draft model must know at least this share of the model's tokens.
_LEAST_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model, ready to draft.

    Attributes:
        model: Its network and facts.
        fresh_caches: Creates its caches.
        profile: The memory of the caches of one row.
    """

    model: RunnableModel
    fresh_caches: CacheFactory
    profile: KvProfile

    def batch(self, vocab_size: int) -> DraftBatch:
        """Return the drafter for the batches of a model.

        Args:
            vocab_size: The width of that model's logits.
        """
        return DraftBatch(
            self.model.network,
            self.fresh_caches,
            PassCosts(self.fresh_caches.plan.pass_seconds),
            own_vocab_size=self.model.card.vocab_size,
            vocab_size=vocab_size,
        )


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a drafter is loaded and tried with.

    Attributes:
        sample: Tokens of a text.
        make_room: Called with the size of both weights before those of the drafter are read.
        notebook: What earlier loads found.
    """

    sample: Sequence[int]
    make_room: MakeRoom = need_no_room
    notebook: Notebook = field(default_factory=Notebook)


def load_draft_model(
    own: ModelOptions, model: RunnableModel, surroundings: Surroundings
) -> LoadedDraft:
    """Return a draft model.

    Args:
        own: Its options, with its directory.
        model: The model that it drafts for, in memory.
        surroundings: What it is loaded and tried with.

    Raises:
        LoadError: It cannot be loaded alongside the model, or cannot draft for it.
    """
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
    """Return the card and memory profile of `load_draft_model`'s result without reading weights.

    Raises:
        LoadError: It cannot be loaded, or cannot draft for the model.
    """
    draft = look(own, Path(own.model), renders=False)
    require_same_vocabulary(draft.tokenizer, model.tokenizer)
    _require_positions(draft)
    return draft.card, foresee(draft.network, CacheFactory(draft.network))


def _examined(
    draft: RunnableModel, model: RunnableModel, sample: Sequence[int], page: Page
) -> LoadedDraft:
    if draft.card.kind is not ModelKind.DECODER:
        kind, name = draft.card.kind.value, draft.card.path
        raise UnsupportedModelError(f"{name} is of the kind {kind}: it generates nothing")
    require_same_vocabulary(draft.tokenizer, model.tokenizer)
    known = [token_id for token_id in sample if token_id < draft.card.vocab_size] or [0]
    fresh_caches = CacheFactory(draft.network)
    if not page.findings.is_sound:
        require_sense(draft.network, fresh_caches, known[:_PROBE_TOKENS])
        page.add(is_sound=True)
    return look_at_draft(draft, known, page, batches=model.card.batches)


def look_at_draft(
    draft: RunnableModel, sample: Sequence[int], page: Page | None = None, *, batches: bool
) -> LoadedDraft:
    """Measure the passes of a draft model, and check that its rows can go back.

    Args:
        draft: A decoder, in memory.
        sample: Tokens of a text that it knows.
        page: What is known of it.
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
