"""Quantised and adapted models of some families."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from backend.model.checkpoint.upstream import Network, import_mlx_lm
from scripts.sweep.text_models import build_text_model

_RANK, _SCALE = 4, 2.0
_FULL, _DORA, _LORA = "full", "dora", "lora"
_SPREAD = {"lora_a": 0.3, "lora_b": 0.3}
# Of a full fine-tune, and of DoRA's magnitudes.
_SHIFT = 0.3

_QUANTISATIONS: Mapping[str, Mapping[str, Any]] = {
    **{f"{bits}bit": {"bits": bits, "group_size": 32} for bits in (2, 3, 4, 6, 8)},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "mxfp8": {"bits": 8, "group_size": 32, "mode": "mxfp8"},
    "nvfp4": {"bits": 4, "group_size": 16, "mode": "nvfp4"},
}
_FOUR = _QUANTISATIONS["4bit"]
# Heads wide enough to be quantised.
_WIDE_HEADS = dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 32)


def _mixed(path: str, _module: object) -> bool | dict[str, int]:
    """Return the quantisation of a layer: some finer than others, a router not at all."""
    if path.endswith("mlp.gate"):
        return False
    is_fine = any(part in path for part in ("lm_head", "embed", "v_proj"))
    return {"bits": 8 if is_fine else 4, "group_size": 32}


@dataclass(frozen=True, slots=True)
class Variant:
    """The differences of a model from its family's.

    Attributes:
        base: The family.
        quantisation: Arguments of mlx-lm's `quantize_model`; empty for none.
        dtype: Of the weights before quantisation.
        adapters: The kind of each adapter of the model, in order.
        config: Fields of config.json that differ from the family's.
    """

    base: str
    quantisation: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    adapters: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    def build(self, directory: Path) -> Path:
        """Write a tiny checkpoint, with its adapters inside, and return its directory."""
        build_text_model(self.base, directory, dtype=self.dtype, changes=self.config)
        if self.quantisation:
            _quantise(directory, self.quantisation)
        for seed, (kind, path) in enumerate(
            zip(self.adapters, self.adapter_paths(directory), strict=True), start=1
        ):
            _write_adapter(path, kind, _network(directory), seed)
        return directory

    def adapter_paths(self, directory: Path) -> Sequence[Path]:
        """Return the directories of a checkpoint's adapters."""
        return [directory / f"adapter-{number}" for number in range(len(self.adapters))]


def _quantised() -> Mapping[str, Variant]:
    bases = ("llama", "qwen3_moe")
    mixed = {"bits": 4, "group_size": 32, "quant_predicate": _mixed}
    modes = {**_QUANTISATIONS, "mixed": mixed}
    return {
        **{f"{b}_{name}": Variant(b, options) for b in bases for name, options in modes.items()},
        **{f"{b}_bfloat16_4bit": Variant(b, _FOUR, "bfloat16") for b in bases},
        "gpt_oss_mxfp4": Variant("gpt_oss", _QUANTISATIONS["mxfp4"]),
        "deepseek_v3_4bit": Variant("deepseek_v3", _FOUR, config=_WIDE_HEADS),
    }


def _adapted() -> Mapping[str, Variant]:
    kinds = ((_LORA,), (_DORA,), (_FULL,), (_LORA, _LORA), (_FULL, _DORA))
    return {
        **{f"llama_{'_'.join(each)}": Variant("llama", adapters=each) for each in kinds},
        "llama_4bit_lora": Variant("llama", _FOUR, adapters=(_LORA,)),
        "qwen3_moe_lora": Variant("qwen3_moe", adapters=(_LORA,)),
    }


VARIANTS = {**_quantised(), **_adapted()}


def _network(directory: Path) -> Network:
    network, _ = import_mlx_lm().load_model(directory)
    return network


def _quantise(directory: Path, options: Mapping[str, Any]) -> None:
    utils = import_mlx_lm()
    network, config = utils.load_model(directory)
    network, config = utils.quantize_model(network, config, **options)
    _write_weights(directory / "model.safetensors", dict(tree_flatten(network.parameters())))
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _write_weights(path: Path, weights: Mapping[str, mx.array]) -> None:
    """Write weights, possibly over the file that they are read from."""
    mx.eval(weights)
    part = path.with_name(f"part-{path.name}")
    mx.save_safetensors(str(part), dict(weights), metadata={"format": "mlx"})
    part.rename(path)


def _write_adapter(directory: Path, kind: str, network: Network, seed: int) -> None:
    """Write a random adapter of a kind for a network, which it changes."""
    from mlx_lm.tuner.utils import linear_to_lora_layers

    mx.random.seed(seed)
    count = len(network.layers)
    parameters = {"rank": _RANK, "scale": _SCALE, "dropout": 0.0}
    if kind != _FULL:
        linear_to_lora_layers(network, count, parameters, use_dora=kind == _DORA)
    directory.mkdir(exist_ok=True)
    trained = _projections if kind == _FULL else _adapter_parameters
    _write_weights(directory / "adapters.safetensors", trained(network))
    config = {"fine_tune_type": kind, "num_layers": count, "lora_parameters": parameters}
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def _projections(network: Network) -> dict[str, mx.array]:
    """Return attention weights, as after a full fine-tune."""
    return _shifted(network, lambda name: name.endswith("q_proj.weight"))


def _adapter_parameters(network: Network) -> dict[str, mx.array]:
    names = dict(tree_flatten(network.parameters()))
    drawn = {
        name: mx.random.normal(weight.shape, scale=_SPREAD[leaf])
        for name, weight in names.items()
        if (leaf := name.rpartition(".")[2]) in _SPREAD
    }
    return {**drawn, **_shifted(network, lambda name: name.endswith(".m"))}


def _shifted(network: Network, is_chosen: Callable[[str], bool]) -> dict[str, mx.array]:
    return {
        name: weight * (1 + _SHIFT * mx.random.normal(weight.shape))
        for name, weight in tree_flatten(network.parameters())
        if is_chosen(name)
    }


def adapted(network: Network, paths: Sequence[Path]) -> Network:
    """Apply adapters to a network as mlx-lm does: all but the last are fused into the weights."""
    for path in paths:
        fused = [(name, m.fuse()) for name, m in network.named_modules() if hasattr(m, "fuse")]
        network.update_modules(tree_unflatten(fused))
        import_mlx_lm().load_adapters(network, str(path))
    network.eval()
    return network
