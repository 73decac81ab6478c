"""Exponentials of many numbers on a Linux CPU.

MLX's wheels for Linux call the C library for each, which takes 12 to 16 ns. Here all take the steps
of a polynomial together, at 2 to 3 ns for each.
"""

import math
import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, TypeAlias

import mlx.core as mx

from backend.cpu.tokenwise import GELU, SILU, UPSTREAM, open_gates
from backend.model.checkpoint.upstream import reroute

# Of fewer, the calls of MLX's functions take longer than they save.
LEAST_NUMBERS = 2**13
# 2^x for |x| <= 1/2 is 1 + x * (...), with a relative error of 9e-8. From the highest power.
_POLYNOMIAL = (0.0013264727, 0.009671513, 0.055507336, 0.24022242, 0.693147)
# A float32 of this size has no bits after the point: adding it rounds, and leaves the integer in
# the lowest bits.
_ROUNDING = 1.5 * 2.0**23
_MANTISSA_BITS = 23
# Powers beyond are as good as zero, or as large as matters; none leaves the normal floats.
_LARGEST_POWER = 100.0
_LOG2_E = math.log2(math.e)


def pays(numbers: int, dtype: mx.Dtype) -> bool:
    """Tell whether the exponentials of some numbers are computed faster here than by MLX."""
    return numbers >= LEAST_NUMBERS and bool(dtype == mx.float32)


def exp(numbers: mx.array) -> mx.array:
    """Return e to the power of numbers; 2 ** -100 for those that are less than that."""
    if not pays(numbers.size, numbers.dtype):
        return mx.exp(numbers)
    return _exp2(numbers * _LOG2_E)


def log_sum_exp(numbers: mx.array) -> mx.array:
    """Return the logarithm [..., 1] of the sums of e to the power of numbers [..., N]."""
    if not pays(numbers.size, numbers.dtype):
        return mx.logsumexp(numbers, axis=-1, keepdims=True)
    top = numbers.max(axis=-1, keepdims=True)
    return top + mx.log(exp(numbers - top).sum(axis=-1, keepdims=True))


def sigmoid(numbers: mx.array) -> mx.array:
    """Return the logistic function of float32 numbers."""
    return 1.0 / (1.0 + _exp2(numbers * -_LOG2_E))


def _exp2(powers: mx.array) -> mx.array:
    powers = mx.clip(powers, -_LARGEST_POWER, _LARGEST_POWER)
    rounded = powers + _ROUNDING
    rest = powers - (rounded - _ROUNDING)
    value = rest * _POLYNOMIAL[0]
    for coefficient in _POLYNOMIAL[1:]:
        value = (value + coefficient) * rest
    exponent = mx.left_shift(mx.view(rounded, mx.int32), _MANTISSA_BITS)
    return mx.view(mx.view(value + 1.0, mx.int32) + exponent, mx.float32)


Activation: TypeAlias = Callable[..., mx.array]
"""From a gate [..., N], and possibly inputs of its shape to multiply with, to their shape."""

# More are computed some rows at a time, so that all in between stays in a core's cache.
MOST_NUMBERS = 2**20
PIECE_NUMBERS = 2**17
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
WITH_GELU = tuple(
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
    for name in WITH_GELU:
        names = vars(sys.modules[name]) if name in sys.modules else {}
        if isinstance(names.get("nn"), ModuleType):
            names["nn"] = _Layers(names["nn"])


class _Layers:
    """The module `mlx.nn`, but for one function."""

    def __init__(self, nn: ModuleType) -> None:
        self._nn = nn
        self.gelu_approx = _routed(GELU, _gelu)(nn.gelu_approx)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (whatever the module has)
        return getattr(self._nn, name)


def _swiglu(gate: mx.array, inputs: mx.array) -> mx.array:
    return gate * sigmoid(gate) * inputs


def _geglu(gate: mx.array, inputs: mx.array) -> mx.array:
    return _gelu(gate) * inputs


def _gelu(gate: mx.array) -> mx.array:
    slope = (mx.square(gate) * _GELU_CUBE + 1.0) * (gate * _GELU_SLOPE)
    return gate * sigmoid(slope)


def _routed(kind: int, compute: Activation) -> Callable[[Activation], Activation]:
    """Return a function from upstream's to one that computes here.

    Args:
        kind: The activation as the kernel knows it.
        compute: Computes many numbers without the kernel.
    """

    def route(upstream: Activation) -> Activation:
        @wraps(upstream)
        def activation(gate: mx.array, *x: mx.array) -> mx.array:
            if UPSTREAM and (opened := open_gates(kind, gate, *x)) is not None:
                return opened
            if gate.size < LEAST_NUMBERS or not pays(gate.size, gate.dtype):
                return upstream(gate, *x)
            if gate.size <= MOST_NUMBERS or any(other.shape != gate.shape for other in x):
                return compute(gate, *x)
            return _in_pieces(compute, gate, *x)

        return activation

    return route


def _in_pieces(compute: Activation, *arrays: mx.array) -> mx.array:
    """Compute arrays [..., N] of one shape some rows at a time."""
    shape = arrays[0].shape
    flat = [array.reshape(-1, shape[-1]) for array in arrays]
    step = max(1, PIECE_NUMBERS // shape[-1])
    pieces = [
        compute(*(array[start : start + step] for array in flat))
        for start in range(0, len(flat[0]), step)
    ]
    return mx.concatenate(pieces).reshape(shape)


_ROUTES = {"swiglu": _routed(SILU, _swiglu), "geglu": _routed(GELU, _geglu)}
