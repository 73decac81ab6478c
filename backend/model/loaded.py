"""A loaded model: facts and text for every thread, the network only for the engine's."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from backend.core.model import ModelCard
from backend.model.text.template import ChatTemplate
from backend.model.text.tokenizer import Tokenizer
from backend.model.vision.media_processor import MediaPreparer, MediaProcessor

if TYPE_CHECKING:
    from backend.model.experts import Experts


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model without its weights: plain Python, thread-safe.

    Attributes:
        media: Prepares images, sounds and videos; `None` for a text-only model.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    card: ModelCard
    media: MediaPreparer | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class RunnableModel(LoadedModel):
    """A model that is ready to run.

    Never leaves the engine process: a reference to it keeps the weights in memory.

    Attributes:
        network: The module of MLX, with its weights.
        experts: Those of its weights that stay on disk, if any.
    """

    media: MediaProcessor | None = field(default=None, kw_only=True)
    network: Any
    experts: "Experts | None" = field(default=None, kw_only=True)
