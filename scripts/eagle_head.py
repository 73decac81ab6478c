"""Gives a tiny model an EAGLE-3 head: a separate checkpoint, in either of its two layouts."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.speculative.drafters.eagle3 import Model, ModelConfig

from scripts.mtp_head import FILE, without_blocks, write

IDS = "eagle_aux_hidden_state_layer_ids"
# Sharp enough that a token attends only to itself.
_SHARPNESS = 8.0
# Of this many consecutive token ids, the head lacks one.
_UNKNOWN_EVERY, _FIRST_UNKNOWN = 64, 33


def add_eagle(
    model: Path,
    head: Path,
    *,
    seed: int = 0,
    is_right: bool = False,
    is_nested: bool = True,
    **fields: Any,  # noqa: ANN401 (fields of config.json)
) -> Path:
    """Create a head for a checkpoint of `tiny_models.build`; return its directory.

    Args:
        model: The directory of the model; its weight file is changed if `is_right`.
        head: A directory for the head.
        seed: Determines its weights.
        is_right: Also change the model so that its blocks add nothing: the token after a token then
            depends only on that token, and the head knows it.
        is_nested: Use the layout of Speculators; otherwise that of SGLang.
        fields: Other fields of its config.json.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    weights = mx.load(str(model / FILE))
    text = config.get("text_config", config)
    ids = [n for n in range(text["vocab_size"]) if n % _UNKNOWN_EVERY != _FIRST_UNKNOWN]
    own = {"draft_vocab_size": len(ids), "norm_before_residual": is_right, **fields}
    drawn = _drawn({**own, "transformer_layer_config": _layer(text)}, seed)
    drawn["d2t"] = mx.array(ids) - mx.arange(len(ids))
    if is_right:
        write(model, config, weights := without_blocks(weights))
        drawn |= _right(drawn, text, weights, mx.array(ids))
    (_write_nested if is_nested else _write_flat)(head, own, _layer(text), drawn)
    return head


def _layer(text: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a layer of one wide attention head."""
    names = ("hidden_size", "vocab_size", "intermediate_size", "rms_norm_eps")
    return {
        **{name: text[name] for name in names},
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": text["hidden_size"],
        "max_position_embeddings": 4096,
    }


def _drawn(config: dict[str, Any], seed: int) -> dict[str, mx.array]:
    head = Model(ModelConfig.from_dict(config))
    mx.random.seed(seed)
    return {
        name: weight
        if weight.ndim < 2
        else mx.random.normal(weight.shape, scale=weight.shape[-1] ** -0.5)
        for name, weight in tree_flatten(head.parameters())
    }


def _right(
    drawn: dict[str, mx.array], text: dict[str, Any], weights: dict[str, mx.array], ids: mx.array
) -> dict[str, mx.array]:
    """Return weights with which the head passes on the embedding of the latest token."""
    width = text["hidden_size"]
    eye = mx.eye(width)
    token = mx.concatenate([eye, mx.zeros((width, width))], axis=1)
    output = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    attention = {"q": token * _SHARPNESS, "k": token * _SHARPNESS, "v": token, "o": eye}
    return {
        **{f"layers.0.self_attn.{name}_proj.weight": each for name, each in attention.items()},
        "layers.0.hidden_norm.weight": mx.zeros((width,)),
        "layers.0.mlp.down_proj.weight": mx.zeros_like(drawn["layers.0.mlp.down_proj.weight"]),
        "norm.weight": weights["model.norm.weight"],
        "lm_head.weight": output[ids],
    }


def _write_nested(
    head: Path, own: dict[str, Any], layer: dict[str, Any], weights: dict[str, mx.array]
) -> None:
    names = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
    config = {**names, "transformer_layer_config": layer, **own}
    write(head, config, {**weights, "t2d": mx.array([True])})


def _write_flat(
    head: Path, own: dict[str, Any], layer: dict[str, Any], weights: dict[str, mx.array]
) -> None:
    names = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    renamed = {
        name.replace("layers.0.", "midlayer."): weight
        for name, weight in weights.items()
        if not name.startswith("embed_tokens")
    }
    write(head, {**names, **layer, **own}, renamed)
