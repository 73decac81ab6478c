"""The activations of gated layers, computed with cheaper exponentials on a Linux CPU."""

import math
import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, TypeAlias

import mlx.core as mx

from backend.cpu.exponentials import LEAST_NUMBERS, pays, sigmoid
from backend.model.checkpoint.upstream import reroute

Activation: TypeAlias = Callable[..., mx.array]
"""From a gate [..., N], and possibly inputs of its shape to multiply with, to their shape."""

# More are computed some rows at a time, so that all in between stays in a core's cache.
_MOST_NUMBERS = 2**20
_PIECE_NUMBERS = 2**17
_GELU_SLOPE = 2 * math.sqrt(2 / math.pi)
_GELU_CUBE = 0.044715

# The functions that families import by name, and the modules that define them.
_GATED = {
    "swiglu": ("mlx_lm.models.activations", "mlx_vlm.models.activations"),
    "geglu": (
        "mlx_lm.models.gemma4_text",
        "mlx_vlm.models.gemma4.language",
        "mlx_vlm.models.gemma4_text.language",
    ),
}
# Modules that call mlx.nn's `gelu_approx`, and not in compiled functions, which know no sizes.
_WITH_GELU = tuple(
    f"mlx_lm.models.{name}"
    for name in ("gemma2", "gemma3_text", "recurrent_gemma", "gpt2", "gpt_neox", "phi")
) + tuple(
    f"mlx_vlm.models.{name}.language"
    for name in ("gemma2", "gemma3", "recurrent_gemma", "gpt2", "gpt_neox", "phi")
)


def prepare_gates() -> None:
    """Have the gates of all imported families computed here; cheap if nothing is new."""
    for name, modules in _GATED.items():
        reroute(name, modules, _ROUTES[name])
    for name in _WITH_GELU:
        names = vars(sys.modules[name]) if name in sys.modules else {}
        if isinstance(names.get("nn"), ModuleType):
            names["nn"] = _Layers(names["nn"])


class _Layers:
    """The module `mlx.nn`, but for one function."""

    def __init__(self, nn: ModuleType) -> None:
        self._nn = nn
        self.gelu_approx = _routed(_gelu)(nn.gelu_approx)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (whatever the module has)
        return getattr(self._nn, name)


def _swiglu(gate: mx.array, inputs: mx.array) -> mx.array:
    return gate * sigmoid(gate) * inputs


def _geglu(gate: mx.array, inputs: mx.array) -> mx.array:
    return _gelu(gate) * inputs


def _gelu(gate: mx.array) -> mx.array:
    slope = (mx.square(gate) * _GELU_CUBE + 1.0) * (gate * _GELU_SLOPE)
    return gate * sigmoid(slope)


def _routed(compute: Activation) -> Callable[[Activation], Activation]:
    """Return a function from upstream's to one that computes many numbers with `compute`."""

    def route(upstream: Activation) -> Activation:
        @wraps(upstream)
        def activation(gate: mx.array, *x: mx.array) -> mx.array:
            if gate.size < LEAST_NUMBERS or not pays(gate.size, gate.dtype):
                return upstream(gate, *x)
            if gate.size <= _MOST_NUMBERS or any(other.shape != gate.shape for other in x):
                return compute(gate, *x)
            return _in_pieces(compute, gate, *x)

        return activation

    return route


def _in_pieces(compute: Activation, *arrays: mx.array) -> mx.array:
    """Compute arrays [..., N] of one shape some rows at a time."""
    shape = arrays[0].shape
    flat = [array.reshape(-1, shape[-1]) for array in arrays]
    step = max(1, _PIECE_NUMBERS // shape[-1])
    pieces = [
        compute(*(array[start : start + step] for array in flat))
        for start in range(0, len(flat[0]), step)
    ]
    return mx.concatenate(pieces).reshape(shape)


_ROUTES = {"swiglu": _routed(_swiglu), "geglu": _routed(_geglu)}
