"""Applies LoRA adapters in Hugging Face's PEFT format to an MLX network."""

import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_unflatten

from backend.config import Adapter
from backend.errors import LoadError
from backend.model.checkpoint.config_file import read_json
from backend.model.checkpoint.failures import one_line
from backend.model.checkpoint.gate import (
    CONFIG,
    PEFT_NAME,
    PEFT_WEIGHTS,
    adapter_directory,
    is_peft,
    named,
    require_readable,
    without_scale,
)
from backend.model.checkpoint.upstream import Network, import_mlx_lm

# However many patterns there are, and layers.
_MATCHING_LIMIT_S = 5.0
_LAYER = re.compile(r"(?:^|\.)(layers\.\d+\..+)$")


def apply_peft(network: Network, directory: Path) -> None:
    """Apply an adapter to the linear layers that it names; its files have been checked."""
    config = read_json(directory / CONFIG, dict)
    path = directory / PEFT_WEIGHTS
    pairs = _pairs(path)
    paths = _module_paths(network, pairs)
    scales = _Scales(path, config)
    layers = [
        (paths[name], _adapted(network, paths[name], parts, scales.of(paths[name]), path))
        for name, parts in pairs.items()
    ]
    network.update_modules(tree_unflatten(layers))


def _pairs(path: Path) -> Mapping[str, Mapping[str, mx.array]]:
    """Return the matrices A [r, in] and B [out, r] by module name."""
    pairs: dict[str, dict[str, mx.array]] = defaultdict(dict)
    for name, weight in mx.load(str(path)).items():
        if match := PEFT_NAME.fullmatch(name):
            pairs[match["module"]][match["part"]] = weight
    return pairs


def _module_paths(network: Network, wanted: Mapping[str, object]) -> Mapping[str, str]:
    """Find the modules of a network by name, or by their path below a numbered layer.

    Libraries nest decoders differently, so the path above the layers may differ.
    """
    linear = [
        name
        for name, module in network.named_modules()
        if isinstance(module, (nn.Linear, nn.QuantizedLinear))
    ]
    in_layer: dict[str, list[str]] = defaultdict(list)
    for name in linear:
        in_layer[_tail(name)].append(name)
    known = set(linear)
    found: dict[str, str] = {}
    for name in wanted:
        candidates = [name] if name in known else in_layer.get(_tail(name), [])
        if len(candidates) != 1:
            problem = f"is for {name}: the model has {len(candidates) or 'no'} linear layers there"
            raise LoadError(problem)
        found[name] = candidates[0]
    return found


def _tail(name: str) -> str:
    match = _LAYER.search(name)
    return match[1] if match else name


def _adapted(
    network: Network,
    module_path: str,
    parts: Mapping[str, mx.array],
    scale: float,
    path: Path,
) -> nn.Module:
    import_mlx_lm()
    from mlx_lm.tuner.lora import LoRALinear

    linear = dict(network.named_modules())[module_path]
    rank = parts["A"].shape[0]
    layer = LoRALinear.from_base(linear, r=rank, dropout=0.0, scale=scale)
    own = (layer.lora_a.shape, layer.lora_b.shape)
    if (given := (parts["A"].T.shape, parts["B"].T.shape)) != own:
        raise LoadError(f"{path}: {module_path} has matrices {given}, but the model takes {own}")
    layer.lora_a, layer.lora_b = parts["A"].T, parts["B"].T
    return layer


class _Scales:
    """The factors of an adapter's products, which may vary by layer."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self._path = path
        self._config = config
        self._ranks = self._patterns("rank_pattern")
        self._alphas = self._patterns("alpha_pattern")
        self._end_s = time.thread_time() + _MATCHING_LIMIT_S

    def of(self, module_path: str) -> float:
        """Return the factor of a layer."""
        rank = self._of_module(self._ranks, module_path, self._config.get("r", 8))
        alpha = self._of_module(self._alphas, module_path, self._config.get("lora_alpha", 8))
        return float(alpha / rank**0.5 if self._config.get("use_rslora") else alpha / rank)

    def _patterns(self, field: str) -> list[tuple[re.Pattern[str], float]]:
        patterns: Mapping[str, float] = self._config.get(field) or {}
        return [(re.compile(rf"(.*\.)?({each})"), value) for each, value in patterns.items()]

    def _of_module(
        self, patterns: Sequence[tuple[re.Pattern[str], float]], module_path: str, common: float
    ) -> float:
        """Return the value of the first pattern that matches the end of a path, as in PEFT."""
        for pattern, value in patterns:
            if pattern.fullmatch(module_path):
                return value
            if time.thread_time() > self._end_s:
                raise LoadError(f"{self._path}: its patterns take more than {_MATCHING_LIMIT_S} s")
        return common


def apply_adapters(network: Network, adapters: Sequence[Adapter], models_dir: Path | None) -> None:
    """Apply adapters to a network, in order.

    The last one stays separate from the weights, exact even if they are quantised; those before it
    are fused, because mlx-lm supports one adapter per layer.
    """
    for adapter in adapters:
        fused = [(name, layer.fuse()) for name, layer in _lora_layers(network)]
        network.update_modules(tree_unflatten(fused))
        with named(adapter.field):
            _apply(network, adapter, adapter_directory(adapter, models_dir))


def _apply(network: Network, adapter: Adapter, directory: Path) -> None:
    require_readable(directory)
    if is_peft(directory):
        apply_peft(network, directory)
    else:
        try:
            import_mlx_lm().load_adapters(network, str(directory))
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = one_line(error)
            raise LoadError(f"{adapter.path} does not fit: {reason}") from error
    layers = _lora_layers(network)
    if not layers and adapter.scale != 1.0:
        raise without_scale(adapter)
    for _, layer in layers:
        layer.scale *= adapter.scale
    network.eval()


def _lora_layers(network: Network) -> list[tuple[str, Network]]:
    return [(name, module) for name, module in network.named_modules() if "lora_a" in module]
