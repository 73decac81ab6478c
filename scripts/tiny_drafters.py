"""Gives a tiny model a drafter that reads its states, in a checkpoint of its own, as published."""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from backend.model.heads import block_type
from scripts.mtp_head import FILE, without_blocks, write

# A tiny Gemma 4, as changes to `tiny_models.build`.
GEMMA4: Mapping[str, Any] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 32,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 24,
    "sliding_window_pattern": 2,
    "use_double_wide_mlp": False,
    "final_logit_softcapping": None,
}
_CLUSTERS = 16


def add_assistant(
    model: Path,
    head: Path,
    *,
    seed: int = 0,
    is_right: bool = False,
    has_clusters: bool = False,
    **fields: Any,  # noqa: ANN401 (fields of config.json)
) -> Path:
    """Create an assistant for a Gemma 4 of `tiny_models.build`; return its directory.

    Args:
        model: The directory of the model; its weight file is changed if `is_right`.
        head: A directory for the assistant.
        seed: Determines its weights.
        is_right: Also change the model so that its blocks add nothing: the token after a token then
            depends only on that token, and the assistant knows it.
        has_clusters: Let it look only at the tokens of the likeliest clusters.
        fields: Other fields of its config.json.
    """
    from mlx_vlm.speculative.drafters.gemma4_assistant import Model, ModelConfig

    config, text, weights = _read(model)
    own = {
        "model_type": "gemma4_assistant",
        "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": text["hidden_size"],
        "use_ordered_embeddings": has_clusters,
        "num_centroids": _CLUSTERS,
        "centroid_intermediate_top_k": _CLUSTERS // 2,
        "text_config": {**text, **_ASSISTANT_LAYERS},
        **fields,
    }
    drawn = _drawn(Model(ModelConfig.from_dict(own)), seed)
    if has_clusters:
        drawn["masked_embedding.token_ordering"] = mx.random.permutation(text["vocab_size"])
    if is_right:
        write(model, config, weights := without_blocks(weights))
        drawn |= _right_assistant(drawn, text["hidden_size"], weights)
    write(head, own, drawn)
    return head


_ASSISTANT_LAYERS: Mapping[str, Any] = {
    "num_hidden_layers": 2,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}


def _right_assistant(
    drawn: dict[str, mx.array], width: int, weights: dict[str, mx.array]
) -> dict[str, mx.array]:
    """Return weights with which an assistant passes on the embedding of the latest token."""
    return {
        **without_blocks({n: w for n, w in drawn.items() if n.startswith("model.layers.")}),
        "pre_projection.weight": mx.concatenate([mx.eye(width), mx.zeros((width, width))], axis=1),
        "model.embed_tokens.weight": weights["lm_head.weight"],
    }


# A tiny Laguna, as changes to `tiny_models.build`.
LAGUNA: Mapping[str, Any] = {
    "model_type": "laguna",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "qkv_bias": False,
    "rope_parameters": {
        kind: {"rope_theta": 10000.0, "rope_type": "default"}
        for kind in ("sliding_attention", "full_attention")
    },
}
# A tiny Muse Glimmer, as changes to `tiny_models.build`.
MUSE: Mapping[str, Any] = {"model_type": "muse_glimmer", "num_hidden_layers": 4}
_EXTRAS = {
    "dflash2": {
        "block_size": 8,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 16,
        "selector_top_k": 8,
    },
    "dspark": {"projector_type": "dspark", "block_size": 7, "markov_rank": 64},
    "laguna": {"block_size": 8, "causal": True},
}
_BLOCKS: Mapping[str, Mapping[str, Any]] = {
    "dflash": {
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "block_size": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 24,
    },
    "dflash2": {"model_type": "qwen3", "architectures": ["DFlash2DraftModel"]},
    "dspark": {"model_type": "qwen3", "architectures": ["Qwen3DSparkModel"]},
    "gemma4_dspark": {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4DSparkModel"],
        "block_size": 7,
        "markov_rank": 64,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "rope_parameters": {"full_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
    },
    "laguna": {
        "model_type": "laguna",
        "architectures": ["LagunaDFlashModel"],
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 24,
        "gating": "per-head",
    },
    "muse": {
        "model_type": "muse_glimmer_assistant",
        "architectures": ["MuseGlimmerAssistantForCausalLM"],
        "block_size": 8,
        "sliding_window": 24,
    },
}


# Kinds with all fields side by side.
_FLAT = ("gemma4_dspark", "muse")


def add_block(
    model: Path,
    head: Path,
    kind: str,
    *,
    seed: int = 0,
    is_right: bool = False,
    **fields: Any,  # noqa: ANN401 (fields of config.json)
) -> Path:
    """Create a drafter of blocks for a checkpoint of `tiny_models.build`; return its directory.

    Args:
        model: The directory of the model; its weight file is changed if `is_right`.
        head: A directory for the drafter.
        kind: A key of `_BLOCKS`.
        seed: Determines its weights.
        is_right: Also change the model so that its blocks add nothing, and each token follows
            itself: a drafter that passes on the first token of a block is right.
        fields: Other fields of its config.json.
    """
    config, text, weights = _read(model)
    own = _block_config(kind, text, is_right=is_right) | fields
    family = importlib.import_module(f"mlx_vlm.speculative.drafters.{block_type(own)}")
    module = family.Model(family.ModelConfig.from_dict(own))
    drawn = _drawn(module, seed)
    if is_right:
        write(model, config, _repeating(weights, text["vocab_size"] - 1))
        drawn |= _right_block(drawn, text["hidden_size"])
    write(head, own, drawn)
    return head


def _block_config(kind: str, text: Mapping[str, Any], *, is_right: bool) -> dict[str, Any]:
    names = ("hidden_size", "vocab_size", "intermediate_size", "rms_norm_eps")
    layers = text["num_hidden_layers"]
    wide = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": text["hidden_size"]}
    narrow = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    extras = {"mask_token_id": text["vocab_size"] - 1, "target_layer_ids": [0, layers - 1]}
    shape = {
        **{name: text[name] for name in names},
        **(wide if is_right else narrow),
        "num_hidden_layers": 2,
        "num_target_layers": layers,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        **_BLOCKS[kind],
    }
    if kind in _FLAT:
        return {**shape, **extras}
    if kind == "laguna":
        shape["draft_vocab_size"] = text["vocab_size"]
        shape["eagle_aux_hidden_state_layer_ids"] = [n + 1 for n in extras["target_layer_ids"]]
        extras["num_target_layers"] = layers
    return {**shape, "dflash_config": {**extras, **_EXTRAS.get(kind, {})}}


def _repeating(weights: dict[str, mx.array], blank: int) -> dict[str, mx.array]:
    """Return weights of a model that repeats each token, except for one without an embedding."""
    table = weights["model.embed_tokens.weight"]
    table[blank] = 0.0
    return {
        **without_blocks(weights),
        "model.embed_tokens.weight": table,
        "lm_head.weight": 4 * table,
    }


def _right_block(drawn: dict[str, mx.array], width: int) -> dict[str, mx.array]:
    """Return weights with which all tokens of a block get the embedding of the first."""
    changed = {}
    for name, weight in drawn.items():
        part = name.removesuffix(".weight").rpartition(".")[2]
        if part in ("k_proj", "v_proj", "o_proj"):
            changed[name] = mx.eye(width)
        elif part == "qkv_proj":
            changed[name] = mx.concatenate([mx.zeros((width, width)), *[mx.eye(width)] * 2])
        elif part == "base_kernel":
            changed[name] = mx.concatenate([mx.ones_like(weight[:, :1]), 0 * weight[:, 1:]], axis=1)
        elif part in _SILENT:
            changed[name] = mx.zeros_like(weight)
    return changed


# Weights without which a drafter sees nothing but the block, token by token.
_SILENT = (
    *("fc", "q_proj", "down_proj", "kernel_projection"),
    *("markov_w2", "hidden_projection", "g_proj"),
)


def _read(model: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, mx.array]]:
    """Return the config of a checkpoint, its fields of the text model, and its weights."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return config, config.get("text_config", config), mx.load(str(model / FILE))


def _drawn(head: Any, seed: int) -> dict[str, mx.array]:  # noqa: ANN401 (a module of upstream)
    """Return random weights of a drafter, except for vectors."""
    mx.random.seed(seed)
    return {
        name: weight
        if weight.ndim < 2
        else mx.random.normal(weight.shape, scale=weight.shape[-1] ** -0.5)
        for name, weight in tree_flatten(head.parameters())
    }
