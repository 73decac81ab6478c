"""Reads and checks a model's directory before MLX loads it."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from backend.errors import LoadError, UnsupportedModelError
from backend.model.checkpoint.config_values import require_sensible
from backend.model.checkpoint.weight_files import require_whole

CONFIG_NAME = "config.json"
WEIGHTS_PATTERN = "model*.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"

Json = TypeVar("Json", dict[str, Any], list[Any])
_JSON_NAMES: Mapping[type, str] = {dict: "object", list: "array"}

_FOREIGN_WEIGHTS = (".gguf", ".bin", ".pt", ".pth", ".npz", ".safetensors", ".onnx")
_SPAN_NAME = re.compile(r"(window|window_size|chunk_size|block_size|index_topk)$")
_TOWER_PREFIXES = ("vision", "audio", "perceiver", "projector")
_LENGTH_NAMES = (
    *("max_position_embeddings", "max_sequence_length", "max_seq_len", "max_seq_length"),
    *("model_max_length", "seq_length", "n_positions", "n_ctx"),
)


def read_config(directory: Path) -> Mapping[str, Any]:
    """Return the content of config.json.

    Raises:
        UnsupportedModelError: The file is missing, or does not name a model type.
        LoadError: It is not a JSON object, or has an impossible value.
    """
    path = directory / CONFIG_NAME
    if not path.is_file():
        raise UnsupportedModelError(
            f"{directory} is not an MLX or safetensors model: it has no config.json"
            f"{_found(directory)}"
        )
    config = read_json(path, dict)
    if not isinstance(config.get("model_type"), str):
        raise UnsupportedModelError(f"{path} does not name a model_type")
    require_sensible(path, config)
    return config


def require_weights(directory: Path) -> None:
    """Check that all weight files exist.

    Raises:
        UnsupportedModelError: There are no safetensors weights; the message lists those found.
        LoadError: Files named in the index are missing, or one is truncated.
    """
    if not any(directory.glob(WEIGHTS_PATTERN)):
        raise UnsupportedModelError(
            f"{directory} has no weights in safetensors files ({WEIGHTS_PATTERN})"
            f"{_found(directory)}"
        )
    _require_listed(directory)
    for path in sorted(directory.glob(WEIGHTS_PATTERN)):
        require_whole(path)


def _require_listed(directory: Path) -> None:
    index = directory / WEIGHTS_INDEX
    if not index.is_file():
        return
    shards = set(read_json(index, dict).get("weight_map", {}).values())
    if missing := sorted(shard for shard in shards if not (directory / shard).is_file()):
        raise LoadError(
            f"{directory} is incomplete: {len(missing)} of {len(shards)} weight files are "
            f"missing, {missing[0]} among them"
        )


def read_generation_config(directory: Path) -> Mapping[str, Any]:
    """Return the content of generation_config.json; empty if it is missing or broken."""
    path = directory / "generation_config.json"
    try:
        return read_json(path, dict) if path.is_file() else {}
    except LoadError:
        return {}


def own_context_length(config: Mapping[str, Any]) -> int | None:
    """Return the model's context length in tokens, or `None` if it sets no limit."""
    for level in (config, config.get("text_config") or {}):
        for name in _LENGTH_NAMES:
            if isinstance(value := level.get(name), int) and value > 0:
                return value
    return None


def attention_spans(config: Mapping[str, Any]) -> frozenset[int]:
    """Return the lengths of windows, blocks and block selections, in tokens.

    Attention takes another path beyond each of them. Those of towers are left out.
    """
    text = {k: v for k, v in config.items() if not k.startswith(_TOWER_PREFIXES)}
    spans: set[int] = set()
    for level in _levels(text):
        named = {name: value for name, value in level.items() if isinstance(value, int)}
        spans.update(value for name, value in named.items() if _SPAN_NAME.search(name))
        block, count = named.get("sparse_block_size", 0), named.get("sparse_topk_blocks", 0)
        spans.add(block * count)
    return frozenset(span for span in spans if span > 1)


def declared_eos_ids(*configs: Mapping[str, Any]) -> frozenset[int]:
    """Return the ids that any of the configurations declares as ending a reply."""
    ids: set[int] = set()
    for config in configs:
        for level in (config, config.get("text_config") or {}):
            value = level.get("eos_token_id")
            declared = value if isinstance(value, Sequence) else [value]
            ids.update(each for each in declared if isinstance(each, int))
    return frozenset(ids)


def read_json(path: Path, kind: type[Json]) -> Json:
    """Return the content of a JSON file.

    Raises:
        LoadError: It cannot be read, or is not of type `kind`.
    """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, kind):
        raise LoadError(f"{path} is not a JSON {_JSON_NAMES[kind]}")
    return value


def _levels(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a configuration and those nested in it for parts of the model."""
    levels = [config]
    while levels:
        level = levels.pop()
        yield level
        levels += [value for value in level.values() if isinstance(value, Mapping)]


def _found(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir() if path.suffix in _FOREIGN_WEIGHTS)
    return f"; found {', '.join(names[:3])}" if names else ""
