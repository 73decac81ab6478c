"""The files of LoRA adapters in the formats of mlx-lm and PEFT, checked without a network."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from backend.config import Adapter, ModelOptions
from backend.errors import LoadError
from backend.model.checkpoint.config_file import read_json, require_whole
from backend.model.checkpoint.hub import find_path
from common.remedies import version_of

CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
WEIGHTS = "adapters.safetensors"

_LORA_NUMBERS = ("rank", "scale", "dropout")
# Other values of these fields change the meaning of the matrices.
_PLAIN_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA", None),
    "bias": ("none", None),
    "use_dora": (False, None),
    "modules_to_save": ([], None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
}


def is_peft(directory: Path) -> bool:
    """Tell whether a directory contains an adapter in PEFT's format."""
    return (directory / PEFT_WEIGHTS).is_file()


def adapter_directory(adapter: Adapter, models_dir: Path | None) -> Path:
    """Return the directory of an adapter.

    Raises:
        LoadError: It is missing, or in another format.
    """
    path = find_path(adapter.path, models_dir)
    if path is None:
        raise LoadError(f"the LoRA adapter {adapter.path} does not exist")
    directory = path if path.is_dir() else path.parent
    names = (CONFIG, PEFT_WEIGHTS if is_peft(directory) else WEIGHTS)
    if missing := next((name for name in names if not (directory / name).is_file()), ""):
        problem = (
            f"has no {missing}: it must be in mlx-lm's format, or in PEFT's with {PEFT_WEIGHTS}"
        )
        raise LoadError(f"the LoRA adapter {adapter.path} {problem}")
    return directory


def require_readable(directory: Path) -> None:
    """Check an adapter as far as its files allow.

    Raises:
        LoadError: The message names the file and the field.
    """
    path = directory / CONFIG
    config = read_json(path, dict)
    if is_peft(directory):
        _require_plain(path, config)
        require_whole(directory / PEFT_WEIGHTS)
        return
    require_whole(directory / WEIGHTS)
    if config.get("fine_tune_type", "lora") == "full":
        return
    if not isinstance(config.get("num_layers"), int):
        raise LoadError(f"{path}: num_layers is missing or not a whole number")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise LoadError(f"{path}: lora_parameters is missing or not an object")
    for name in _LORA_NUMBERS:
        if not isinstance(parameters.get(name), int | float):
            raise LoadError(f"{path}: lora_parameters.{name} is missing or not a number")


def _require_plain(path: Path, config: Mapping[str, Any]) -> None:
    for name, values in _PLAIN_FIELDS.items():
        if config.get(name) not in values:
            raise LoadError(
                f"{path}: {name} is {config[name]!r}, which cannot be applied: only plain LoRA can"
            )


_DIGEST_BYTES = 12
# These libraries compute the KV: another version may compute it differently.
_PACKAGES = ("mlx", "mlx-lm", "mlx-vlm")


def fingerprint(options: ModelOptions, directory: Path, types: Sequence[str]) -> str:
    """Return an alphanumeric name for a model, its adapters and the way it is run.

    Weights are identified by name, size and time: reading them all would take too long.

    Args:
        options: Options that it was loaded with.
        directory: Directory of the model.
        types: The data types of its weights in memory, which may not be those of its files.
    """
    adapters = [
        (list(weight_files(adapter_directory(adapter, options.models_dir))), adapter.scale)
        for adapter in options.adapters
    ]
    memory = options.tuning.memory
    identity = {
        "model": list(weight_files(directory)),
        "adapters": adapters,
        "types": list(types),
        "vision": options.tuning.checkpoint.vision,
        "kv": [memory.kv_bits, memory.kv_group_size, options.tuning.prompt_cache.cache_bits],
        "versions": [version_of(name) for name in _PACKAGES],
    }
    text = json.dumps(identity)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def weight_files(directory: Path) -> Iterator[tuple[str, int, int]]:
    """Yield name, size and time of the files that make up a model."""
    for path in sorted(directory.rglob("*")):
        if path.suffix in (".json", ".safetensors", ".py"):
            status = path.stat()
            yield str(path.relative_to(directory)), status.st_size, status.st_mtime_ns
