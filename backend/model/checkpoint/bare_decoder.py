"""Checkpoints of a decoder without its head, as embedding models are published.

The names of their weights begin inside the decoder, and mlx-lm 0.32 looks for them one level up.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

import mlx.core as mx

from backend.model.checkpoint.config import WEIGHTS_PATTERN

Weights: TypeAlias = dict[str, mx.array]

# Without a head of its own, a network makes its logits with the embeddings of its tokens.
HEADLESS_CONFIG: Mapping[str, Any] = {"tie_word_embeddings": True}


def is_bare_decoder(directory: Path) -> bool:
    """Tell by the names of the weights; reads none of them."""
    names = {name for path in directory.glob(WEIGHTS_PATTERN) for name in mx.load(str(path))}
    roots = {name.partition(".")[0] for name in names}
    return "layers" in roots and "model" not in roots


def decoder_classes(config: Mapping[str, Any]) -> tuple[type, type]:
    """Return the classes of a network and of its arguments, as mlx-lm's `load_model` wants them.

    The network takes the weights of its decoder for all it is given.
    """
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    sanitize = getattr(module.Model, "sanitize", lambda _network, weights: weights)

    def sanitize_decoder(network: object, weights: Weights) -> Weights:
        named = {f"model.{name}": weight for name, weight in weights.items()}
        return cast("Weights", sanitize(network, named))

    members = {"sanitize": sanitize_decoder, "__module__": module.__name__}
    return type("Model", (module.Model,), members), module.ModelArgs
