"""Gives a tiny model a drafter that reads its states, in a checkpoint of its own, as published."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

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
