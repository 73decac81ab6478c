"""Gives a tiny GLM an MTP head, as an extra layer of its checkpoint or split off as by mlx-vlm."""

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from scripts.mtp_head import FILE, without_blocks, write

_LAYER = "model.layers.0."
_OWN = ("enorm.", "hnorm.", "eh_proj.")
# Prefixes of names in the layer, and in a separate checkpoint.
_SPLIT = {
    "shared_head.norm.": "model.shared_head_norm.",
    "shared_head.head.": "lm_head.",
    "embed_tokens.": "model.embed_tokens.",
}
# MLA weights, stored as one in checkpoints of PyTorch.
_KEYS, _VALUES = "self_attn.embed_q.weight", "self_attn.unembed_out.weight"


def add_nextn(
    directory: Path, apart: Path | None = None, *, seed: int = 0, is_right: bool = False
) -> Path:
    """Create a head for a checkpoint of `tiny_models.build`; return the head's directory.

    Args:
        directory: The directory of the model, whose weight file is changed.
        apart: A directory for the head alone; otherwise it is added to the model's weights.
        seed: Determines the weights of the head.
        is_right: Also change the model so that its blocks add nothing: the token after a token then
            depends only on that token, and the head knows it.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    weights = mx.load(str(directory / FILE))
    head = _drawn(config, seed)
    head["embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    head["shared_head.head.weight"] = weights["lm_head.weight"]
    if is_right:
        width = config["hidden_size"]
        head["eh_proj.weight"] = mx.concatenate([mx.eye(width), mx.zeros((width, width))], axis=1)
        weights, head = without_blocks(weights), without_blocks(head)
    if apart is None:
        prefix = f"model.layers.{config['num_hidden_layers']}."
        weights |= {prefix + name: weight for name, weight in _unpacked(head).items()}
    else:
        kind = f"{config['model_type']}_mtp"
        rename = _SPLITS.get(kind, _split)
        own = {"model_type": kind, "text_config": config}
        write(apart, own, {rename(name): weight for name, weight in head.items()})
    write(directory, config, weights)
    return apart or directory


def _drawn(config: dict[str, Any], seed: int) -> dict[str, mx.array]:
    """Return the weights of a layer with experts and of the norms and projection around it."""
    family = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    changes = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    one_layer = family.Model(family.ModelArgs.from_dict(config | changes))
    width = config["hidden_size"]
    shapes = {
        name.removeprefix(_LAYER): weight.shape
        for name, weight in tree_flatten(one_layer.parameters())
        if name.startswith(_LAYER)
    }
    norms = dict.fromkeys(("enorm.weight", "hnorm.weight", "shared_head.norm.weight"), (width,))
    mx.random.seed(seed)
    return {
        name: mx.random.normal(shape, scale=shape[-1] ** -0.5) if len(shape) > 1 else mx.ones(shape)
        for name, shape in {**shapes, **norms, "eh_proj.weight": (width, 2 * width)}.items()
    }


def _unpacked(head: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return weights in the layout of PyTorch: one per expert, keys and values together."""
    found: dict[str, mx.array] = {}
    for name, weight in head.items():
        if "switch_mlp." in name:
            experts = {
                name.replace("switch_mlp", f"experts.{n}"): each for n, each in enumerate(weight)
            }
            found |= experts
        elif name not in (_KEYS, _VALUES):
            found[name] = weight
    if _KEYS in head:
        both = mx.concatenate([head[_KEYS].swapaxes(-1, -2), head[_VALUES]], axis=1)
        found["self_attn.kv_b_proj.weight"] = both.reshape(-1, both.shape[-1])
    return found


def _split(name: str) -> str:
    for old, new in _SPLIT.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return f"model.{name}" if name.startswith(_OWN) else f"model.mtp_block.{name}"


def _split_dsa(name: str) -> str:
    return "mtp." + name.replace("shared_head.norm.", "shared_head_norm.")


# How names change in checkpoints that mlx-vlm has split off, by their model types.
_SPLITS = {"glm_moe_dsa_mtp": _split_dsa}
