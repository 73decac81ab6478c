"""Heads and experts of a checkpoint, told from its config and the names of its weights."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.errors import LoadError, UnsupportedModelError
from backend.model.checkpoint.config_file import (
    WEIGHTS_PATTERN,
    indexed_files,
    read_config,
    tensor_shapes,
)


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """Where checkpoints keep an MTP head of their own.

    Attributes:
        families: Model types.
        prefix: The prefix of its weights; `{layers}` is the number of layers of the model.
    """

    families: frozenset[str]
    prefix: str


_QWEN = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
_NEXTN = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
QWEN = MtpLayout(frozenset(_QWEN), "mtp.")
NEXTN = MtpLayout(frozenset(_NEXTN), "model.layers.{layers}.")
NEMOTRON = MtpLayout(frozenset({"nemotron_h"}), "mtp.")
GLM5_NEXT = MtpLayout(frozenset({"glm5_next"}), "model.language_model.layers.{layers}.")
_LAYOUTS = (QWEN, NEXTN, NEMOTRON, GLM5_NEXT)


def mtp_layout(directory: Path) -> MtpLayout | None:
    """Return the layout of the MTP head in a model's checkpoint, if it contains one."""
    config = read_config(directory)
    text = config.get("text_config") or {}
    types = {str(level.get("model_type")) for level in (config, text)}
    layouts = [layout for layout in _LAYOUTS if types & layout.families]
    names = weight_names(directory) if layouts else ()
    layers = {**config, **text}.get("num_hidden_layers")
    prefixes = {layout.prefix.format(layers=layers): layout for layout in layouts}
    found = (prefixes[each] for each in prefixes if any(name.startswith(each) for name in names))
    return next(found, None)


def may_have_experts(directory: Path) -> bool:
    """Tell whether a checkpoint speaks of experts at all; every mixture does."""
    names = {*_keys(read_config(directory))} | weight_names(directory)
    return any("expert" in name for name in names)


def no_mtp_head(directory: Path) -> UnsupportedModelError:
    """Return why a checkpoint cannot draft with a head of its own."""
    return UnsupportedModelError(f"{directory} brings no MTP head that can be used")


def no_experts() -> LoadError:
    """Return why experts cannot stay on disk."""
    return LoadError("the model has none that could stay on disk", field="experts")


def weight_names(directory: Path) -> Set[str]:
    """Return the names of a checkpoint's weights, from its index or the headers of its files."""
    if files := indexed_files(directory):
        return files.keys()
    return {name for path in directory.glob(WEIGHTS_PATTERN) for name in tensor_shapes(path)}


def _keys(level: Mapping[str, Any]) -> Set[str]:
    inner = (_keys(value) for value in level.values() if isinstance(value, dict))
    return {*level}.union(*inner)
