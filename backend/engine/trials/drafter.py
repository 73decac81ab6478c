"""Loads the drafter of a model: a draft model or a head."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from backend.config import ModelOptions
from backend.core.model import ModelCard
from backend.engine.findings import Notebook
from backend.engine.rows.admission import KvProfile
from backend.engine.trials.draft_model import (
    LoadedDraft,
    Surroundings,
    foresee_draft_model,
    load_draft_model,
)
from backend.engine.trials.head import foresee_head, load_head
from backend.errors import LoadError, UnsupportedModelError
from backend.model.checkpoint.draft import asks_for_several, draft_options
from backend.model.checkpoint.weights import MakeRoom, need_no_room
from backend.model.heads.kinds import HeadKind, head_alone, head_beside
from backend.model.loaded import RunnableModel

Found = TypeVar("Found")

log = logging.getLogger(__name__)


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
        model: The model that it drafts for, in memory.
        sample: Tokens of a text.
        make_room: Called with the size of both weights before those of the drafter are read.
        notebook: What earlier loads found.

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
    return loaded


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
        lambda kind, directory: foresee_head(kind, directory, options.dtype, model),
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
    try:
        if kind := head_alone(directory):
            return take_head(kind, directory)
        if options.tuning.speculation.speculation == "mtp":
            raise UnsupportedModelError(f"{directory} is no head, and speculation is mtp")
        return take_model(own)
    except LoadError as error:
        raise type(error)(f"draft_model: {error}") from error


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
            raise UnsupportedModelError(f"{directory} brings no MTP head that can be used")
    except LoadError as error:
        if wanted == "mtp":
            raise type(error)(f"speculation: {error}") from error
        log.warning("the MTP head of %s is not used: %s", model.card.name, error)
    return None


def _may_have_head(options: ModelOptions) -> bool:
    """Tell whether the options allow a head of the model's own checkpoint."""
    wanted = options.tuning.speculation.speculation
    return wanted in ("auto", "mtp") and not asks_for_several(options)
