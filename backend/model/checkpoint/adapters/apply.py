"""Applies LoRA adapters, in the formats of mlx-lm and PEFT, to a network."""

from collections.abc import Sequence
from pathlib import Path

from mlx.utils import tree_unflatten

from backend.config import Adapter
from backend.errors import LoadError
from backend.model.checkpoint.adapters.peft import CONFIG, WEIGHTS, apply_peft, is_peft
from backend.model.checkpoint.config import read_json
from backend.model.checkpoint.failures import one_line
from backend.model.checkpoint.paths import find_path
from backend.model.checkpoint.upstream import Network, import_mlx_lm
from backend.model.checkpoint.weight_files import require_whole

ADAPTER_FILES = (CONFIG, "adapters.safetensors")

_LORA_NUMBERS = ("rank", "scale", "dropout")


def apply_adapters(network: Network, adapters: Sequence[Adapter], models_dir: Path | None) -> None:
    """Apply adapters to a network, in order.

    The last one stays separate from the weights, exact even if they are quantised; those before it
    are fused, because mlx-lm supports one adapter per layer.

    Raises:
        LoadError: An adapter is missing or does not fit; the message names it.
    """
    directories = [adapter_directory(adapter, models_dir) for adapter in adapters]
    for adapter, directory in zip(adapters, directories, strict=True):
        _fuse(network)
        _apply(network, adapter, directory)


def adapter_directory(adapter: Adapter, models_dir: Path | None) -> Path:
    """Return the directory of an adapter.

    Raises:
        LoadError: It is missing, or in another format.
    """
    path = find_path(adapter.path, models_dir)
    if path is None:
        raise LoadError(f"the LoRA adapter {adapter.path} does not exist")
    directory = path if path.is_dir() else path.parent
    files = (CONFIG, WEIGHTS) if is_peft(directory) else ADAPTER_FILES
    for name in files:
        if not (directory / name).is_file():
            raise LoadError(
                f"the LoRA adapter {adapter.path} has no {name}: it must be in mlx-lm's format, "
                f"or in PEFT's with {WEIGHTS}"
            )
    return directory


def _apply(network: Network, adapter: Adapter, directory: Path) -> None:
    if is_peft(directory):
        apply_peft(network, directory)
    else:
        _require_readable(directory)
        try:
            import_mlx_lm().load_adapters(network, str(directory))
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = one_line(error)
            raise LoadError(f"the LoRA adapter {adapter.path} does not fit: {reason}") from error
    layers = _lora_layers(network)
    if not layers and adapter.scale != 1.0:
        raise LoadError(f"the adapter {adapter.path} is a full fine-tune: it has no scale")
    for _, layer in layers:
        layer.scale *= adapter.scale
    network.eval()


def _require_readable(directory: Path) -> None:
    """Check an adapter in mlx-lm's format as far as its files allow.

    Raises:
        LoadError: The message names the file and the field.
    """
    config_name, weights_name = ADAPTER_FILES
    path = directory / config_name
    config = read_json(path, dict)
    require_whole(directory / weights_name)
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


def _fuse(network: Network) -> None:
    fused = [(name, layer.fuse()) for name, layer in _lora_layers(network)]
    network.update_modules(tree_unflatten(fused))


def _lora_layers(network: Network) -> list[tuple[str, Network]]:
    return [(name, module) for name, module in network.named_modules() if "lora_a" in module]
