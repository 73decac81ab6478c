"""Loads a head, and checks whether it can draft for the model."""

from dataclasses import dataclass, replace
from pathlib import Path

from backend.config import ModelOptions
from backend.core.model import ModelCard
from backend.engine.drafts.pricing import PassCosts
from backend.engine.passes.caches import CacheFactory
from backend.engine.passes.draft_batch import HeadBatch
from backend.engine.rows.admission import KvProfile
from backend.engine.rows.row_states import MOST_TOKENS
from backend.engine.trials.draft_model import LoadedDraft, Surroundings, look_at_draft
from backend.engine.trials.kv_profile import foresee
from backend.engine.trials.model_key import files_digest, model_key
from backend.model.checkpoint.weights import (
    evaluate,
    memory_bytes,
    require_memory,
    weights_bytes,
)
from backend.model.heads.kinds import HeadKind, build_head
from backend.model.heads.network import HeadNetwork, HiddenTap
from backend.model.loaded import RunnableModel


@dataclass(frozen=True, slots=True)
class LoadedHead(LoadedDraft):
    """A head, ready to draft.

    Attributes:
        tap: Keeps the states of the model for the head.
    """

    tap: HiddenTap

    def batch(self, vocab_size: int) -> HeadBatch:
        """Return the drafter for the batches of the model."""
        return HeadBatch(
            self.model.network,
            self.tap,
            self.fresh_caches,
            PassCosts(self.fresh_caches.plan.pass_seconds),
            vocab_size=vocab_size,
        )


def load_head(
    kind: HeadKind,
    directory: Path,
    own: ModelOptions,
    model: RunnableModel,
    surroundings: Surroundings,
) -> LoadedHead:
    """Return the head of a directory.

    Args:
        kind: The kind of the head.
        directory: The directory of the head alone, or of the checkpoint that contains it.
        own: The options of the model.
        model: The model that it drafts for, in memory.
        surroundings: What it is loaded and tried with.

    Raises:
        LoadError: It cannot be loaded alongside the model, or cannot draft for it.
    """
    head = build_head(kind, directory, model.network, own.dtype)
    needed, own_bytes = weights_bytes(head), model.card.weights_bytes
    require_memory(needed, memory_bytes() - own_bytes)
    surroundings.make_room(own_bytes + needed)
    evaluate(head)
    part = replace(model, network=head, card=_card(kind, directory, model, needed))
    page = surroundings.notebook.page(
        f"{model_key(own, model)}-{kind.name}-{files_digest(directory)}"
    )
    look = look_at_draft(part, surroundings.sample, page, batches=model.card.batches)
    profile = _with_states(look.profile, head)
    return LoadedHead(look.model, look.fresh_caches, profile, HiddenTap(head.tapped))


def foresee_head(
    kind: HeadKind, directory: Path, dtype: str | None, model: RunnableModel
) -> tuple[ModelCard, KvProfile]:
    """Return the card and memory profile of `load_head`'s result without reading weights.

    Raises:
        LoadError: It cannot be loaded alongside the model.
    """
    head = build_head(kind, directory, model.network, dtype)
    card = _card(kind, directory, model, weights_bytes(head))
    return card, _with_states(foresee(head, CacheFactory(head)), head)


def _with_states(profile: KvProfile, head: HeadNetwork) -> KvProfile:
    """Add the states of the model that a row keeps until the head has read them."""
    states_bytes = MOST_TOKENS * head.token_bytes
    return replace(profile, fixed_bytes=profile.fixed_bytes + states_bytes)


def _card(kind: HeadKind, directory: Path, model: RunnableModel, own_bytes: int) -> ModelCard:
    return replace(model.card, path=str(directory), model_type=kind.name, weights_bytes=own_bytes)
