"""Applies LoRA adapters, in the formats of mlx-lm and PEFT, to a network."""

from collections.abc import Sequence
from pathlib import Path

from mlx.utils import tree_unflatten

from backend.config import Adapter
from backend.errors import LoadError
from backend.model.checkpoint.adapters.files import (
    adapter_directory,
    is_peft,
    require_readable,
)
from backend.model.checkpoint.adapters.peft import apply_peft
from backend.model.checkpoint.failures import one_line
from backend.model.checkpoint.upstream import Network, import_mlx_lm


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


def _apply(network: Network, adapter: Adapter, directory: Path) -> None:
    require_readable(directory)
    if is_peft(directory):
        apply_peft(network, directory)
    else:
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


def _fuse(network: Network) -> None:
    fused = [(name, layer.fuse()) for name, layer in _lora_layers(network)]
    network.update_modules(tree_unflatten(fused))


def _lora_layers(network: Network) -> list[tuple[str, Network]]:
    return [(name, module) for name, module in network.named_modules() if "lora_a" in module]
