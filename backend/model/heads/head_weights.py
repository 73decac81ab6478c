"""The weights of a head: read from its files under the names of its network."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn

from backend.model.checkpoint.config import WEIGHTS_PATTERN
from backend.model.checkpoint.upstream import Network


def read_weights(directory: Path, rename: Callable[[str], str | None]) -> dict[str, mx.array]:
    """Return the weights of a directory, lazily.

    Args:
        directory: Of the head, or of the checkpoint that contains it.
        rename: Gives a weight's name in the head's network; `None` if it is not of the head.
    """
    found: dict[str, mx.array] = {}
    for path in sorted(directory.glob(WEIGHTS_PATTERN)):
        for name, weight in mx.load(str(path)).items():
            if (own := rename(name)) is not None:
                found[own] = weight
    return found


def load_weights(
    head: Network, weights: Mapping[str, mx.array], quantization: Mapping[str, Any] | None
) -> None:
    """Give a head its weights, lazily.

    Args:
        head: Upstream's module.
        weights: All that it has.
        quantization: What config.json says of them, if they are quantised.

    Raises:
        ValueError: They are others than the head has.
    """
    names = ("group_size", "bits", "mode")
    if chosen := {name: value for name, value in (quantization or {}).items() if name in names}:
        nn.quantize(head, **chosen, class_predicate=lambda path, _: f"{path}.scales" in weights)
    head.load_weights(list(weights.items()))
