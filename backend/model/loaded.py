"""A loaded model: its facts and text for every thread, its network for the engine's alone."""

from dataclasses import dataclass, field
from typing import Any

from backend.core.model import ModelCard
from backend.model.text.template import ChatTemplate
from backend.model.text.tokenizer import Tokenizer
from backend.model.vision.media_processor import MediaPreparer, MediaProcessor


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model without its weights: plain Python, safe from any thread.

    Attributes:
        media: Prepares images, sounds and videos; `None` for a model that reads text only.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    card: ModelCard
    media: MediaPreparer | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class RunnableModel(LoadedModel):
    """A model, ready to run.

    Never leaves the engine process: holding it keeps the weights in memory.

    Attributes:
        network: The MLX module.
    """

    media: MediaProcessor | None = field(default=None, kw_only=True)
    network: Any

    def plain(self) -> LoadedModel:
        """Return the part that needs no MLX."""
        return LoadedModel(self.tokenizer, self.template, self.card, media=self.media)
