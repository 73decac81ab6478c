"""Builds missing models: `python -m benchmarks.harness.build_models`."""

import shutil
from pathlib import Path

from benchmarks.harness.models import ALL, BenchModel
from scripts.draft_pair import split_off
from scripts.eagle_head import add_eagle
from scripts.mtp_head import add_head
from scripts.tiny_models import build, build_llama, build_mamba2

SIZED = {"llama": build_llama, "mamba2": build_mamba2}


def build_model(model: BenchModel) -> None:
    """Write a model to its directory."""
    if not model.shape:
        build(model.family, model.directory)
        return
    if model.family in SPECIAL:
        SPECIAL[model.family](model)
        return
    hidden, layers, vocab = model.shape
    SIZED[model.family](model.directory, hidden=hidden, layers=layers, vocab=vocab)


def _build_pair(model: BenchModel) -> None:
    hidden, layers, vocab, rest = model.shape
    part = _empty(model)
    build_llama(part, hidden=hidden, layers=layers, vocab=vocab)
    split_off(part, part.with_suffix(".draft"), rest=rest / 100).rename(part / "draft")
    part.rename(model.directory)


def _build_with_mtp(model: BenchModel) -> None:
    hidden, layers, vocab, is_right = model.shape
    part, heads = _empty(model), hidden // 64
    build(
        "qwen3_5",
        part,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=3 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=64,
        linear_num_value_heads=heads,
        linear_num_key_heads=heads // 2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        vocab_size=vocab,
    )
    add_head(part, part / "draft", is_right=bool(is_right))
    part.rename(model.directory)


def _build_with_eagle(model: BenchModel) -> None:
    hidden, layers, vocab, is_right = model.shape
    part = _empty(model)
    build_llama(part, hidden=hidden, layers=layers, vocab=vocab)
    add_eagle(part, part / "draft", is_right=bool(is_right))
    part.rename(model.directory)


def _empty(model: BenchModel) -> Path:
    """Return a directory to build a model in, without what an earlier attempt left."""
    part = model.directory.with_suffix(".part")
    for directory in (part, part.with_suffix(".draft")):
        shutil.rmtree(directory, ignore_errors=True)
    return part


SPECIAL = {
    "paired_llama": _build_pair,
    "mtp_qwen3_5": _build_with_mtp,
    "eagle_llama": _build_with_eagle,
}


if __name__ == "__main__":
    for missing in (model for model in ALL if not model.is_built):
        build_model(missing)
