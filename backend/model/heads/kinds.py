"""The kinds of heads, and detection of the kind in a directory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx

from backend.model.checkpoint.config_file import (
    CONFIG_NAME,
    WEIGHTS_INDEX,
    WEIGHTS_PATTERN,
    read_config,
    read_json,
    require_weights,
)
from backend.model.checkpoint.failures import UPSTREAM_FAILURES, as_load_error
from backend.model.checkpoint.upstream import Network, is_installed
from backend.model.heads.eagle import build_eagle, is_eagle3
from backend.model.heads.mtp import SPLIT_TYPES, build_mtp, build_nextn
from backend.model.heads.network import HeadNetwork

Build: TypeAlias = Callable[[Path, Network, str | None], HeadNetwork]


@dataclass(frozen=True, slots=True)
class HeadKind:
    """A kind of heads.

    Attributes:
        name: Shown to users.
        is_alone: Tells from a config.json whether a checkpoint contains only such a head.
        build: Creates the network from a directory, the model, and an optional data type.
        families: Model types whose own checkpoints contain such a head.
        prefix: The prefix of its weights there; `{layers}` is the number of layers of the model.
    """

    name: str
    is_alone: Callable[[Mapping[str, Any]], bool]
    build: Build
    families: frozenset[str] = frozenset()
    prefix: str = ""


_NEXTN = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
_QWEN = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")

KINDS = (
    HeadKind(
        name="MTP head",
        is_alone=lambda config: config.get("model_type") == "qwen3_5_mtp",
        build=build_mtp,
        families=frozenset(_QWEN),
        prefix="mtp.",
    ),
    HeadKind(
        name="MTP head",
        is_alone=lambda config: config.get("model_type") in SPLIT_TYPES,
        build=build_nextn,
        families=frozenset(_NEXTN),
        prefix="model.layers.{layers}.",
    ),
    HeadKind(name="EAGLE-3 head", is_alone=is_eagle3, build=build_eagle),
)


def head_alone(directory: Path) -> HeadKind | None:
    """Return the kind of the head that is all that a directory holds, if it is one.

    Raises:
        LoadError: There is a config.json that cannot be read.
    """
    path = directory / CONFIG_NAME
    config = read_json(path, dict) if path.is_file() else {}
    return next((kind for kind in KINDS if kind.is_alone(config)), None)


def head_beside(directory: Path) -> HeadKind | None:
    """Return the kind of the head in a model's checkpoint, if it is usable.

    Reads only the names of weights.

    Raises:
        LoadError: Its config.json cannot be read.
    """
    config = read_config(directory)
    text = config.get("text_config") or {}
    types = {config.get("model_type"), text.get("model_type")}
    kinds = [kind for kind in KINDS if types & kind.families]
    if not kinds or not is_installed("mlx_vlm"):
        return None
    names, layers = _weight_names(directory), {**config, **text}.get("num_hidden_layers")
    prefixes = {kind.prefix.format(layers=layers): kind for kind in kinds}
    found = (kind for prefix, kind in prefixes.items() if any(n.startswith(prefix) for n in names))
    return next(found, None)


def build_head(kind: HeadKind, directory: Path, network: Network, dtype: str | None) -> HeadNetwork:
    """Return the head of a directory, with weights still on disk.

    Raises:
        LoadError: The head is unusable; the message is written for users.
    """
    require_weights(directory)
    try:
        return kind.build(directory, network, dtype)
    except UPSTREAM_FAILURES as failure:
        raise as_load_error(failure, directory) from failure


def _weight_names(directory: Path) -> set[str]:
    """Return the names of a checkpoint's weights, from its index or the headers of its files."""
    index = directory / WEIGHTS_INDEX
    if index.is_file():
        return set(read_json(index, dict).get("weight_map", {}))
    return {name for path in directory.glob(WEIGHTS_PATTERN) for name in mx.load(str(path))}
