"""The random-weight models that are measured, built once under `build/bench`."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CACHE = ROOT / "build" / "bench"


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A float32 llama; its name tells how many parameters it has."""

    name: str
    hidden: int
    layers: int
    vocab: int

    @property
    def directory(self) -> Path:
        """Where it lies, built or not; another shape lies elsewhere."""
        return CACHE / f"llama-{self.hidden}x{self.layers}-{self.vocab}"


SMALL = BenchModel("4M", hidden=256, layers=4, vocab=2048)
"""So small that everything around the model shows."""

LARGE = BenchModel("60M", hidden=640, layers=8, vocab=16384)


def ensure_built() -> None:
    """Build the models that are missing, in processes of their own: this one imports no MLX."""
    for model in (SMALL, LARGE):
        if not (model.directory / "config.json").exists():
            shape = map(str, (model.hidden, model.layers, model.vocab))
            command = (sys.executable, "-m", "benchmarks.build_model", str(model.directory))
            subprocess.run([*command, *shape], cwd=ROOT, check=True)
