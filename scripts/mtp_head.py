"""Gives a tiny Qwen3.5, Qwen3-Next, Nemotron-H or GLM-5-Next an MTP head, as in checkpoints."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.speculative.drafters.mtp_split import get_mtp_splitter
from mlx_vlm.utils import get_model_and_args

FILE = "model.safetensors"
# The weights by which a block adds to the residual stream.
_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "switch_mlp.fc2.weight")
# Of two experts' matrices, the names in a module and in checkpoints.
_EXPERTS = {"switch_mlp.fc1": "up_proj", "switch_mlp.fc2": "down_proj"}
_GATED = ("gate_proj", "up_proj")
# Of a Nemotron-H with a head, as changes to `tiny_models.build`.
NEMOTRON: Mapping[str, Any] = {
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_ROPE = {"type": "default", "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}


def add_head(
    directory: Path, apart: Path | None = None, *, seed: int = 0, is_right: bool = False
) -> Path:
    """Create a head for a checkpoint of `tiny_models.build`; return its directory.

    Args:
        directory: Of the model, whose weight file is changed.
        apart: A directory for the head alone; otherwise it is added to the model's weights.
        seed: Determines the weights of the head.
        is_right: Also change the model so that its blocks add nothing: the token after a token then
            depends only on that token, and the head knows it.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    if "rope_theta" in text:
        text.setdefault("rope_parameters", {**_ROPE, "rope_theta": text["rope_theta"]})
    weights = mx.load(str(directory / FILE))
    head_config, head = _drawn_head(config, seed)
    if is_right:
        width = text["hidden_size"]
        name = next(name for name in head if name.endswith(("fc.weight", "eh_proj.weight")))
        head[name] = mx.concatenate([mx.eye(width), mx.zeros((width, width))], axis=1)
        weights, head = without_blocks(weights), without_blocks(head)
    if apart is None:
        weights |= _beside(text, head)
    else:
        write(apart, head_config, head)
    write(directory, config, weights)
    return apart or directory


def write(directory: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> None:
    """Write a checkpoint of one file."""
    directory.mkdir(parents=True, exist_ok=True)
    mx.eval(weights)
    mx.save_safetensors(str(directory / FILE), weights, metadata={"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def without_blocks(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return weights whose blocks add nothing."""
    return {
        name: mx.zeros_like(weight) if name.endswith(_OUTPUTS) else weight
        for name, weight in weights.items()
    }


def _beside(text: Mapping[str, Any], head: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the weights of a head as they are in the checkpoint of its model."""
    if text["model_type"] != "glm5_next_text":
        return {f"mtp.{name}": weight for name, weight in _unstacked(head).items()}
    layer = f"model.language_model.layers.{text['num_hidden_layers']}."
    return {layer + name: weight for name, weight in _parted(head, text["q_lora_rank"]).items()}


def _parted(head: dict[str, mx.array], queries: int) -> dict[str, mx.array]:
    """Return the weights of a GLM-5-Next's head, each matrix apart, but keys and values as one.

    Args:
        queries: The rank of its queries.
    """
    found: dict[str, mx.array] = {}
    pairs = {"qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"), "gate_up_proj": _GATED}
    for name, weight in head.items():
        own = name.removeprefix("mtp_block.").replace("shared_head_norm", "shared_head.norm")
        joined = next((each for each in pairs if each in own), None)
        if "switch_mlp" in own:
            found |= {own.replace("switch_mlp", f"experts.{n}"): w for n, w in enumerate(weight)}
        elif joined:
            place = queries if joined == "qkv_a_proj" else weight.shape[0] // 2
            parts = zip(pairs[joined], mx.split(weight, [place]), strict=True)
            found |= {own.replace(joined, part): each for part, each in parts}
        else:
            found[own] = weight
    keys, values = (found.pop(f"self_attn.{name}.weight") for name in ("embed_q", "unembed_out"))
    both = mx.concatenate([keys.swapaxes(-1, -2), values], axis=1)
    return found | {"self_attn.kv_b_proj.weight": both.reshape(-1, both.shape[-1])}


def _unstacked(head: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return weights with those of Nemotron-H's experts one by one."""
    found = {}
    for name, weight in head.items():
        stacked = next((each for each in _EXPERTS if each in name), None)
        if stacked is None:
            found[name] = weight
            continue
        for n, expert in enumerate(weight):
            found[name.replace(stacked, f"experts.{n}.{_EXPERTS[stacked]}")] = expert
    return found


def _drawn_head(config: dict[str, Any], seed: int) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Return the config of a head and its weights."""
    splitter = get_mtp_splitter(source_config=config)
    text = splitter.read_text_config(config)
    own = {"model_type": splitter.output_model_type, "text_config": text}
    module, _ = get_model_and_args(own)
    head = module.Model(module.ModelConfig.from_dict(own))
    mx.random.seed(seed)
    return own, {
        name: weight
        if weight.ndim < 2
        else mx.random.normal(weight.shape, scale=weight.shape[-1] ** -0.5)
        for name, weight in tree_flatten(head.parameters())
    }
