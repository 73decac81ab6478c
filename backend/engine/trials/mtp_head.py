"""Load an MTP head beside the model that it is a part of, and find out if it can draft."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from backend.core.model import ModelCard
from backend.engine.drafts.costs import PassCosts
from backend.engine.passes.caches import CacheFactory
from backend.engine.passes.mtp_batch import MtpBatch
from backend.engine.rows.admission import KvProfile
from backend.engine.trials.draft_model import LoadedDraft, look_at_draft
from backend.engine.trials.kv_profile import foresee
from backend.model.checkpoint.weights import (
    MakeRoom,
    evaluate,
    memory_bytes,
    need_no_room,
    require_memory,
    weights_bytes,
)
from backend.model.loaded import RunnableModel
from backend.model.mtp_head import HiddenTap, build_head

KIND = "MTP head"


@dataclass(frozen=True, slots=True)
class LoadedHead(LoadedDraft):
    """An MTP head, ready to draft.

    Attributes:
        tap: On the model whose states it reads.
    """

    tap: HiddenTap

    def batch(self, vocab_size: int) -> MtpBatch:
        """Return what drafts for the batches of the model."""
        return MtpBatch(
            self.model.network,
            self.tap,
            self.fresh_caches,
            PassCosts(self.fresh_caches.plan.pass_seconds),
            vocab_size=vocab_size,
        )


def load_head(
    directory: Path,
    dtype: str | None,
    model: RunnableModel,
    sample: Sequence[int],
    make_room: MakeRoom = need_no_room,
) -> LoadedHead:
    """Return the head that a directory holds.

    Args:
        directory: Of the head alone, or of the checkpoint that brings it.
        dtype: That its weights are cast to, if they are.
        model: In memory.
        sample: Tokens of a text.
        make_room: Told the size of the weights of both before those of the head are read.

    Raises:
        LoadError: It cannot be loaded beside the model, or cannot draft for it.
    """
    head, own_bytes = build_head(directory, model.network, dtype), model.card.weights_bytes
    needed = weights_bytes(head)
    require_memory(needed, memory_bytes() - own_bytes)
    make_room(own_bytes + needed)
    evaluate(head)
    part = replace(model, network=head, card=_card(directory, model, needed))
    look = look_at_draft(part, sample, batches=model.card.batches)
    return LoadedHead(look.model, look.fresh_caches, look.profile, HiddenTap(model.network))


def foresee_head(
    directory: Path, dtype: str | None, model: RunnableModel
) -> tuple[ModelCard, KvProfile]:
    """Return what `load_head` would load, and what its caches take; reads no weight.

    Raises:
        LoadError: It cannot be loaded beside the model.
    """
    head = build_head(directory, model.network, dtype)
    return _card(directory, model, weights_bytes(head)), foresee(head, CacheFactory(head))


def _card(directory: Path, model: RunnableModel, own_bytes: int) -> ModelCard:
    return replace(model.card, path=str(directory), model_type=KIND, weights_bytes=own_bytes)
