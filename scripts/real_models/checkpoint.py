"""Writes checkpoints in a hub's layout, in float32, in bf16 or quantised by MLX."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from scripts.real_models.source import Source

DTYPES = {"f32": "float32", "bf16": "bfloat16"}
_GROUP_SIZE = 64
# The hub's names, and those of GGUF.
_ROLES = {"bos": "bos", "eos": "eos", "pad": "padding"}
_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
}
_WEIGHTS = "model.safetensors"


def described(
    source: Source, network: dict[str, Any], tokenizer: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """Return a checkpoint's JSON files by their names without suffix.

    Args:
        source: The GGUF file that they are made from.
        network: The entries of its configuration that differ between the families.
        tokenizer: `tokenizer.json`.
        settings: The entries of `tokenizer_config.json` that differ.
    """
    ids = {f"{role}_token_id": source.vocabulary(f"{key}_token_id") for role, key in _ROLES.items()}
    texts = source.vocabulary("tokens")
    shared = {name: source.of(key) for name, key in _SIZES.items()}
    return {
        "config": {
            **shared,
            "attention_bias": False,
            "tie_word_embeddings": True,
            **network,
            **ids,
        },
        "generation_config": ids,
        "tokenizer": tokenizer,
        "tokenizer_config": {
            "clean_up_tokenization_spaces": False,
            "model_max_length": source.of("context_length"),
            **{f"{role}_token": texts[ids[f"{role}_token_id"]] for role in _ROLES},
            "unk_token": texts[source.vocabulary("unknown_token_id")],
            "added_tokens_decoder": {
                str(one["id"]): {key: value for key, value in one.items() if key != "id"}
                for one in source.added_tokens
            },
            **settings,
        },
    }


def write(
    folder: Path, tensors: dict[str, np.ndarray], files: dict[str, Any], precision: str
) -> None:
    """Write weights of one of `DTYPES` and the JSON files that go with them."""
    folder.mkdir(parents=True)
    name = DTYPES[precision]
    weights = {key: mx.array(weight).astype(getattr(mx, name)) for key, weight in tensors.items()}
    mx.save_safetensors(str(folder / _WEIGHTS), weights, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(one.nbytes for one in weights.values())},
        "weight_map": dict.fromkeys(sorted(weights), _WEIGHTS),
    }
    config = {**files["config"], "torch_dtype": name}
    for stem, value in {**files, "config": config, f"{_WEIGHTS}.index": index}.items():
        text = json.dumps(value, ensure_ascii=False, indent=2)
        (folder / f"{stem}.json").write_text(text, encoding="utf-8")


def quantise(source: Path, folder: Path, bits: int) -> None:
    """Write a checkpoint once more, quantised; all but weights and configuration is copied."""
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("model.safetensors*"))
    network, config = load_model(source)
    network, config = quantize_model(network, config, _GROUP_SIZE, bits)
    save_model(folder, network)
    save_config(config, folder / "config.json")


def rounded(source: Source) -> Source:
    """Return the same with matrices that bf16 can hold, in float32; vectors are so as published."""
    return Source(
        source.metadata,
        {
            name: weight if weight.ndim == 1 else _rounded(weight)
            for name, weight in source.tensors.items()
        },
    )


def _rounded(weight: np.ndarray) -> np.ndarray:
    return np.array(mx.array(weight).astype(mx.bfloat16).astype(mx.float32))
