"""Checkpoints of a decoder without a head, the usual form of embedding models.

Their weight names start inside the decoder; mlx-lm 0.32 expects them one level further up.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

import mlx.core as mx

from backend.model.checkpoint.config import WEIGHTS_PATTERN

Weights: TypeAlias = dict[str, mx.array]

# Without a head, a network computes its logits with the token embeddings.
HEADLESS_CONFIG: Mapping[str, Any] = {"tie_word_embeddings": True}


def is_bare_decoder(directory: Path) -> bool:
    """Tell by the names of the weights, without reading the weights."""
    names = {name for path in directory.glob(WEIGHTS_PATTERN) for name in mx.load(str(path))}
    roots = {name.partition(".")[0] for name in names}
    return "layers" in roots and "model" not in roots


def decoder_classes(config: Mapping[str, Any]) -> tuple[type, type]:
    """Return the classes of a network and of its arguments, for mlx-lm's `load_model`.

    The network takes all given weights as its decoder's.
    """
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    sanitize = getattr(module.Model, "sanitize", lambda _network, weights: weights)

    def sanitize_decoder(network: object, weights: Weights) -> Weights:
        named = {f"model.{name}": weight for name, weight in weights.items()}
        return cast("Weights", sanitize(network, named))

    members = {"sanitize": sanitize_decoder, "__module__": module.__name__}
    return type("Model", (module.Model,), members), module.ModelArgs
