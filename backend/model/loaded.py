"""What loading gives: facts and text for everyone, and the network for the engine thread."""

from dataclasses import dataclass, field
from typing import Any

from backend.core.model import ModelCard
from backend.model.media_processor import MediaProcessor
from backend.model.template import ChatTemplate
from backend.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LoadedModel:
    """All of a model but its weights: plain Python, safe from any thread.

    Attributes:
        media: Prepares what is not text; `None` for a model that reads text only.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    card: ModelCard
    media: MediaProcessor | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class RunnableModel(LoadedModel):
    """A model, ready to run.

    Never leaves the engine thread: whoever holds it keeps the weights in memory.

    Attributes:
        network: The MLX module.
    """

    network: Any

    def plain(self) -> LoadedModel:
        """Return what may cross the thread line."""
        return LoadedModel(self.tokenizer, self.template, self.card, media=self.media)
