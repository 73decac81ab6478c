"""Enlarges a model without changing its output: a pass costs as much as the new size."""

from collections.abc import Mapping
from math import sqrt
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

# These write into the residual stream; all others read from it.
_WRITERS = ("o_proj.weight", "down_proj.weight", "embed_tokens.weight")
_WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")


def widened(
    config: Mapping[str, Any], weights: Mapping[str, mx.array], *, hidden: int, layers: int
) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Return a larger qwen3 with the same outputs, except for rounding.

    The given weights are a corner of each matrix. The rest is random and computed like all others,
    but not written back into the residual stream.

    Args:
        config: Of the given model.
        weights: Its own, float32.
        hidden: Width, a multiple of its own.
        layers: At least as many as it has.
    """
    factor = hidden // config["hidden_size"]
    wide = {**config, **{name: factor * config[name] for name in _WIDTHS}}
    # The mean square of the residual stream now covers more numbers, most of them 0.
    wide |= {"num_hidden_layers": layers, "rms_norm_eps": config["rms_norm_eps"] / factor}
    network = qwen3.Model(qwen3.ModelArgs.from_dict(wide))
    mx.random.seed(0)
    return wide, {
        name: _filled(name, shape, weights.get(name), factor)
        for name, shape in ((name, each.shape) for name, each in tree_flatten(network.parameters()))
    }


def _filled(name: str, shape: tuple[int, ...], own: mx.array | None, factor: int) -> mx.array:
    if name.endswith(_WRITERS):
        whole = mx.zeros(shape)
    elif len(shape) > 1:
        whole = mx.random.normal(shape, scale=shape[-1] ** -0.5)
    else:
        whole = mx.ones(shape)
    if own is not None:
        scale = 1 / sqrt(factor) if name.endswith(_NORMS) else 1.0
        whole[tuple(slice(size) for size in own.shape)] = own * scale
    return whole
