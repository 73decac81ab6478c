"""The files of LoRA adapters in the formats of mlx-lm and PEFT, checked without a network."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend.config import Adapter
from backend.errors import LoadError
from backend.model.checkpoint.config import read_json
from backend.model.checkpoint.paths import find_path
from backend.model.checkpoint.weight_files import require_whole

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
