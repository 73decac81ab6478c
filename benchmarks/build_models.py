"""Build the models that are missing: `python -m benchmarks.build_models`."""

from benchmarks.models import ALL, BenchModel
from scripts.tiny_models import build, build_llama, build_mamba2

SIZED = {"llama": build_llama, "mamba2": build_mamba2}


def build_model(model: BenchModel) -> None:
    """Write a model to its directory."""
    if not model.shape:
        build(model.family, model.directory)
        return
    hidden, layers, vocab = model.shape
    SIZED[model.family](model.directory, hidden=hidden, layers=layers, vocab=vocab)


if __name__ == "__main__":
    for missing in (model for model in ALL if not model.is_built):
        build_model(missing)
