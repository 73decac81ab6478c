"""Build tiny checkpoints for retrieval from the tiny models: embedders and rerankers."""

import json
from pathlib import Path

import mlx.core as mx
from transformers import AutoTokenizer

from scripts.tiny_models import build

_MODULE_PREFIX = "sentence_transformers.models."


def build_embedder(
    family: str, directory: Path, *, pooling: str = "lasttoken", parts: tuple[str, ...] = ()
) -> Path:
    """Write an embedding model with the files of sentence-transformers.

    Args:
        family: As for `build`.
        directory: Created if necessary.
        pooling: The enabled mode.
        parts: The modules after the pooling: `Normalize`, `Dense`.
    """
    build(family, directory)
    return add_modules(directory, pooling=pooling, parts=parts)


def add_modules(directory: Path, *, pooling: str, parts: tuple[str, ...] = ()) -> Path:
    """Add the files of sentence-transformers to a model, as for `build_embedder`."""
    kinds = ("Transformer", "Pooling", *parts)
    modules = [
        {"idx": i, "path": f"{i}_{kind}" if i else "", "type": _MODULE_PREFIX + kind}
        for i, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    modes = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    flags = {f"pooling_mode_{mode}": mode == pooling for mode in modes}
    (directory / "1_Pooling").mkdir()
    config = {"word_embedding_dimension": 64, **flags, "include_prompt": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def strip_head(directory: Path) -> Path:
    """Reduce a model to its decoder, with its weights named as inside it."""
    path = directory / "model.safetensors"
    weights = mx.load(str(path))
    bare = {
        name.removeprefix("model."): weight
        for name, weight in weights.items()
        if name.startswith("model.")
    }
    mx.eval(bare)
    mx.save_safetensors(str(path), bare, metadata={"format": "mlx"})
    return directory


def build_reranker(directory: Path) -> Path:
    """Write a model like Qwen3-Reranker: "yes" and "no" are tokens."""
    build("qwen3", directory)
    answers = ["yes", "no"]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens(answers)
    tokenizer.save_pretrained(str(directory))
    path = directory / "model.safetensors"
    weights = mx.load(str(path))
    key = mx.random.key(1)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        key, subkey = mx.random.split(key)
        width = weights[name].shape[-1]
        rows = mx.random.normal((len(answers), width), scale=width**-0.5, key=subkey)
        weights[name] = mx.concatenate([weights[name], rows])
    mx.eval(weights)
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["vocab_size"] += len(answers)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
