"""Tells from a checkpoint's files how it embeds, and whether it reranks.

The files are those of sentence-transformers: `modules.json` lists the parts of the model, and
`1_Pooling/config.json` defines how token vectors become one.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backend.core.embedding import EmbeddingProfile, Pooling
from backend.core.scoring import RerankerKind
from backend.model.checkpoint.config import read_json

_MODULES = "modules.json"
_POOLING = "1_Pooling/config.json"
_POOLING_FLAG = re.compile(r"pooling_mode_(?P<mode>\w+?)(_tokens?)?")
_KNOWN_PARTS = frozenset({"transformer", "pooling", "normalize"})
_POOLING_MODES = {"mean": Pooling.MEAN, "lasttoken": Pooling.LAST, "cls": Pooling.CLS}


def embedding_profile(directory: Path, name: str, config: Mapping[str, Any]) -> EmbeddingProfile:
    """Return how a checkpoint computes embeddings.

    Args:
        directory: Directory of the checkpoint.
        name: Name of the model; identifies embedding models without these files.
        config: Its config.json.

    Raises:
        LoadError: A file is broken.
    """
    parts = _parts(directory / _MODULES)
    modes = _pooling_modes(directory / _POOLING)
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        return EmbeddingProfile(obstacle="its attention looks ahead, decoders here do not")
    is_embedder = bool(parts) or "embed" in name.lower()
    return _profile(parts, modes, Pooling.LAST if is_embedder else Pooling.MEAN)


def encoder_profile(directory: Path) -> EmbeddingProfile:
    """Return how an encoder embeds: the mean of all tokens, unless its files say otherwise.

    Raises:
        LoadError: A file is broken.
    """
    return _profile(
        _parts(directory / _MODULES), _pooling_modes(directory / _POOLING), Pooling.MEAN
    )


def reranker_kind(name: str, config: Mapping[str, Any]) -> RerankerKind | None:
    """Return the reranker family of a checkpoint, if any."""
    is_qwen3 = config.get("model_type") == "qwen3" and "rerank" in name.lower()
    return RerankerKind.QWEN3 if is_qwen3 else None


def _profile(parts: Sequence[str], modes: Sequence[str], default: Pooling) -> EmbeddingProfile:
    if foreign := [part for part in parts if part not in _KNOWN_PARTS]:
        return EmbeddingProfile(obstacle=f"modules.json has an unknown part: {foreign[0]}")
    if modes and (len(modes) > 1 or modes[0] not in _POOLING_MODES):
        return EmbeddingProfile(obstacle=f"its pooling mode is unknown: {' and '.join(modes)}")
    return EmbeddingProfile(
        pooling=_POOLING_MODES[modes[0]] if modes else default,
        is_normalized="normalize" in parts,
    )


def _parts(path: Path) -> list[str]:
    """Return the types of a model's parts, in lower case."""
    modules = read_json(path, list) if path.is_file() else []
    return [str(module.get("type")).rpartition(".")[2].lower() for module in modules]


def _pooling_modes(path: Path) -> list[str]:
    """Return the enabled modes, which are given as flags or as a list of names."""
    pooling = read_json(path, dict) if path.is_file() else {}
    if modes := pooling.get("pooling_mode"):
        return [modes] if isinstance(modes, str) else [str(mode) for mode in modes]
    flags = [name for name, value in pooling.items() if value is True]
    return [match["mode"] for flag in flags if (match := _POOLING_FLAG.fullmatch(flag))]
