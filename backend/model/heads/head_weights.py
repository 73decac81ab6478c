"""Reads the files of a head, and renames its weights for its network."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn

from backend.model.checkpoint.config import CONFIG_NAME, WEIGHTS_PATTERN, read_json
from backend.model.checkpoint.config_values import require_sensible
from backend.model.checkpoint.upstream import Network


def read_head_config(directory: Path) -> dict[str, Any]:
    """Return the content of the config.json of a head, which need not name a model type.

    Raises:
        LoadError: It cannot be read, or has an impossible value.
    """
    path = directory / CONFIG_NAME
    config = read_json(path, dict)
    require_sensible(path, config)
    return config


def read_weights(directory: Path, rename: Callable[[str], str | None]) -> dict[str, mx.array]:
    """Return the weights of a directory, lazily.

    Args:
        directory: The directory of the head, or of the checkpoint that contains it.
        rename: Returns a weight's name in the head's network; `None` for other weights.
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
    """Set the weights of a head, lazily.

    Args:
        head: Upstream's module.
        weights: All its weights.
        quantization: The quantisation given by config.json, if any.

    Raises:
        ValueError: The weights do not match the head.
    """
    names = ("group_size", "bits", "mode")
    if chosen := {name: value for name, value in (quantization or {}).items() if name in names}:
        nn.quantize(head, **chosen, class_predicate=lambda path, _: f"{path}.scales" in weights)
    head.load_weights(list(weights.items()))
