"""all-MiniLM-L6-v2 as a GGUF file, so that llama.cpp can compute references for its vectors."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from scripts.real_models.source import CONTROL, NORMAL, Source

_PARTS = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_EMBEDDINGS = {
    "word_embeddings": "token_embd",
    "token_type_embeddings": "token_types",
    "position_embeddings": "position_embd",
    "LayerNorm": "token_embd_norm",
}
_MEAN_POOLING = 1


def as_source(checkpoint: Path) -> Source:
    """Read a checkpoint of BERT with mean pooling under the names of a GGUF file."""
    from safetensors.numpy import load_file

    weights = load_file(checkpoint / "model.safetensors")
    named = ((_name(name), weight) for name, weight in weights.items())
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    file = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    return Source(
        {**_network(config), **_vocabulary(file["model"]["vocab"])},
        {name: weight.astype(np.float32) for name, weight in named if name},
    )


def _name(name: str) -> str:
    """Return a tensor's name for llama.cpp; none for one that mean pooling leaves unused."""
    group, _, rest = name.partition(".")
    part, _, kind = rest.rpartition(".")
    if group == "embeddings" and part in _EMBEDDINGS:
        return f"{_EMBEDDINGS[part]}.{kind}"
    if group == "encoder":
        _, layer, part = part.split(".", 2)
        return f"blk.{layer}.{_PARTS[part]}.{kind}"
    return ""


def _network(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "general.architecture": "bert",
        "bert.context_length": config["max_position_embeddings"],
        "bert.embedding_length": config["hidden_size"],
        "bert.feed_forward_length": config["intermediate_size"],
        "bert.block_count": config["num_hidden_layers"],
        "bert.attention.head_count": config["num_attention_heads"],
        "bert.attention.layer_norm_epsilon": config["layer_norm_eps"],
        "bert.attention.causal": False,
        "bert.pooling_type": _MEAN_POOLING,
    }


def _vocabulary(ids: dict[str, int]) -> dict[str, Any]:
    texts = sorted(ids, key=ids.__getitem__)
    special = [text.startswith("[") and text.endswith("]") and len(text) > 2 for text in texts]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.tokens": [
            text if is_special else text[2:] if text.startswith("##") else f"▁{text}"
            for text, is_special in zip(texts, special, strict=True)
        ],
        "tokenizer.ggml.token_type": [CONTROL if one else NORMAL for one in special],
        "tokenizer.ggml.bos_token_id": ids["[CLS]"],
        "tokenizer.ggml.eos_token_id": ids["[SEP]"],
        "tokenizer.ggml.seperator_token_id": ids["[SEP]"],  # as llama.cpp spells it
        "tokenizer.ggml.unknown_token_id": ids["[UNK]"],
        "tokenizer.ggml.padding_token_id": ids["[PAD]"],
        "tokenizer.ggml.mask_token_id": ids["[MASK]"],
    }
