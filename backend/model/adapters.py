"""LoRA adapters in mlx-lm's format, put onto a network."""

from collections.abc import Sequence
from pathlib import Path

from mlx.utils import tree_unflatten

from backend.config import Adapter
from backend.errors import LoadError
from backend.model.failures import one_line
from backend.model.paths import find_path
from backend.model.upstream import Network, import_mlx_lm

ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors")


def apply_adapters(network: Network, adapters: Sequence[Adapter], models_dir: Path | None) -> None:
    """Put adapters onto a network, in order.

    The last one stays beside the weights, exact even where they are quantised; those before it
    are fused into them, for mlx-lm puts one adapter onto a layer.

    Raises:
        LoadError: An adapter is missing, or does not fit; names it.
    """
    directories = [adapter_directory(adapter, models_dir) for adapter in adapters]
    for adapter, directory in zip(adapters, directories, strict=True):
        _fuse(network)
        _apply(network, adapter, directory)


def adapter_directory(adapter: Adapter, models_dir: Path | None) -> Path:
    """Return where an adapter lies.

    Raises:
        LoadError: It is missing, or in another format.
    """
    path = find_path(adapter.path, models_dir)
    if path is None:
        raise LoadError(f"the LoRA adapter {adapter.path} does not exist")
    directory = path if path.is_dir() else path.parent
    for name in ADAPTER_FILES:
        if not (directory / name).is_file():
            raise LoadError(
                f"the LoRA adapter {adapter.path} has no {name}: it must be in mlx-lm's format"
            )
    return directory


def _apply(network: Network, adapter: Adapter, directory: Path) -> None:
    try:
        import_mlx_lm().load_adapters(network, str(directory))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = one_line(error)
        raise LoadError(f"the LoRA adapter {adapter.path} does not fit: {reason}") from error
    layers = _lora_layers(network)
    if not layers and adapter.scale != 1.0:
        raise LoadError(f"the adapter {adapter.path} is a full fine-tune: it has no scale")
    for _, layer in layers:
        layer.scale *= adapter.scale
    network.eval()


def _fuse(network: Network) -> None:
    fused = [(name, layer.fuse()) for name, layer in _lora_layers(network)]
    network.update_modules(tree_unflatten(fused))


def _lora_layers(network: Network) -> list[tuple[str, Network]]:
    return [(name, module) for name, module in network.named_modules() if "lora_a" in module]
