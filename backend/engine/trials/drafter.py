"""Load what drafts for a model: a draft model or an MTP head, whichever there is."""

import logging
from collections.abc import Sequence
from pathlib import Path

from backend.config import ModelOptions
from backend.engine.trials.draft_model import LoadedDraft, load_draft_model
from backend.engine.trials.mtp_head import load_head
from backend.errors import LoadError, UnsupportedModelError
from backend.model.checkpoint.draft import asks_for_several, draft_options
from backend.model.checkpoint.weights import MakeRoom, need_no_room
from backend.model.loaded import RunnableModel
from backend.model.mtp_head import brings_head, is_head

log = logging.getLogger(__name__)


def load_draft(
    options: ModelOptions,
    model: RunnableModel,
    sample: Sequence[int],
    make_room: MakeRoom = need_no_room,
) -> LoadedDraft | None:
    """Return what the options name, else the head that the model's checkpoint brings, if any.

    Args:
        options: Of the LoadModel, with the directory of the draft model.
        model: That it drafts for, in memory.
        sample: Tokens of a text.
        make_room: Told the size of the weights of both before those of the drafter are read.

    Raises:
        LoadError: It cannot be loaded beside the model, or cannot draft for it.
    """
    own = draft_options(options)
    if own is None:
        loaded = _own_head(options, model, sample, make_room)
    else:
        try:
            loaded = _named(own, options, model, sample, make_room)
        except LoadError as error:
            raise type(error)(f"draft_model: {error}") from error
    if loaded is not None:
        card = loaded.model.card
        kind = card.model_type if own else "MTP head"
        size_gb = card.weights_bytes / 1e9
        log.info("%s (%s, %.2f GB) drafts for %s", card.path, kind, size_gb, model.card.name)
    return loaded


def _named(
    own: ModelOptions,
    options: ModelOptions,
    model: RunnableModel,
    sample: Sequence[int],
    make_room: MakeRoom,
) -> LoadedDraft:
    directory = Path(own.model)
    if is_head(directory):
        return load_head(directory, options.dtype, model, sample, make_room)
    if options.tuning.speculation.speculation == "mtp":
        raise UnsupportedModelError(f"{directory} is no MTP head, and speculation is mtp")
    return load_draft_model(own, model, sample, make_room)


def _own_head(
    options: ModelOptions, model: RunnableModel, sample: Sequence[int], make_room: MakeRoom
) -> LoadedDraft | None:
    """Return the head of the model's own checkpoint; only one that was asked for must be there."""
    wanted, directory = options.tuning.speculation.speculation, Path(model.card.path)
    if wanted not in ("auto", "mtp") or asks_for_several(options):
        return None
    try:
        if brings_head(directory):
            return load_head(directory, options.dtype, model, sample, make_room)
        if wanted == "mtp":
            raise UnsupportedModelError(
                f"{directory} brings no MTP head that can be used, and draft_model names none"
            )
    except LoadError as error:
        if wanted == "mtp":
            raise type(error)(f"speculation: {error}") from error
        log.warning("the MTP head of %s is not used: %s", model.card.name, error)
    return None
