"""Builds models by their names: `python -m benchmarks.harness.build_models NAME...`."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from mlx_lm import convert

from benchmarks.harness.models import ALL, GPU, MIXTURE, BenchModel, GpuModel
from scripts.draft_pair import split_off
from scripts.eagle_head import add_eagle
from scripts.mtp_head import add_head
from scripts.tiny_models import build, build_llama, build_mamba2

BFLOAT16_BITS = 16
SIZED = {"llama": build_llama, "mamba2": build_mamba2}


def build_model(model: BenchModel | GpuModel) -> None:
    """Write a model to its directory."""
    if isinstance(model, GpuModel):
        _build_for_gpu(model)
        return
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


def _build_mixture(model: BenchModel) -> None:
    hidden, layers, vocab, experts, used, width = model.shape
    build(
        model.family,
        model.directory,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        vocab_size=vocab,
        num_experts=experts,
        num_experts_per_tok=used,
        moe_intermediate_size=width,
    )


def _build_for_gpu(model: GpuModel) -> None:
    width = model.width
    if model.bits < BFLOAT16_BITS:
        wide = replace(model, bits=BFLOAT16_BITS)
        if not wide.is_built:
            _build_for_gpu(wide)
        part = _empty(model)
        convert(str(wide.directory), str(part), quantize=True, q_bits=model.bits)
        part.rename(model.directory)
        return
    build(
        "llama",
        model.directory,
        dtype="bfloat16",
        hidden_size=width.hidden,
        num_hidden_layers=width.layers,
        intermediate_size=width.intermediate,
        num_attention_heads=width.heads[0],
        num_key_value_heads=width.heads[1],
        head_dim=width.hidden // width.heads[0],
        vocab_size=width.vocab,
        tie_word_embeddings=width.is_tied,
        rope_theta=500_000.0,
        max_position_embeddings=131_072,
    )


def _empty(model: BenchModel | GpuModel) -> Path:
    """Return the directory to build a model in, after removing that of an earlier attempt."""
    part = model.directory.with_suffix(".part")
    for directory in (part, part.with_suffix(".draft")):
        shutil.rmtree(directory, ignore_errors=True)
    return part


SPECIAL = {
    "paired_llama": _build_pair,
    "mtp_qwen3_5": _build_with_mtp,
    "eagle_llama": _build_with_eagle,
    "qwen3_moe": _build_mixture,
}


if __name__ == "__main__":
    named = {model.name: model for model in (*ALL, *GPU, MIXTURE)}
    for name in sys.argv[1:]:
        build_model(named[name])
