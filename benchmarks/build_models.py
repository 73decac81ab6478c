"""Builds missing models: `python -m benchmarks.build_models`."""

import shutil

from benchmarks.models import ALL, BenchModel
from scripts.draft_pair import split_off
from scripts.tiny_models import build, build_llama, build_mamba2

SIZED = {"llama": build_llama, "mamba2": build_mamba2}


def build_model(model: BenchModel) -> None:
    """Write a model to its directory."""
    if not model.shape:
        build(model.family, model.directory)
        return
    if model.family == "paired_llama":
        _build_pair(model)
        return
    hidden, layers, vocab = model.shape
    SIZED[model.family](model.directory, hidden=hidden, layers=layers, vocab=vocab)


def _build_pair(model: BenchModel) -> None:
    hidden, layers, vocab, rest = model.shape
    part = model.directory.with_suffix(".part")
    for directory in (part, part.with_suffix(".draft")):
        shutil.rmtree(directory, ignore_errors=True)
    build_llama(part, hidden=hidden, layers=layers, vocab=vocab)
    split_off(part, part.with_suffix(".draft"), rest=rest / 100).rename(part / "draft")
    part.rename(model.directory)


if __name__ == "__main__":
    for missing in (model for model in ALL if not model.is_built):
        build_model(missing)
