"""What loading gives: the network for the engine thread, and what everyone else may use."""

from dataclasses import dataclass
from typing import Any

from backend.core.model import ModelCard
from backend.model.template import ChatTemplate
from backend.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, ready to run.

    Attributes:
        network: The MLX module; only the engine thread may touch it. The rest is plain Python,
            safe from any thread.
    """

    network: Any
    tokenizer: Tokenizer
    template: ChatTemplate
    card: ModelCard
