"""Exponentials of many numbers on a Linux CPU.

MLX's wheels for Linux call the C library for each, which takes 12 to 16 ns. Here all take the steps
of a polynomial together, at 2 to 3 ns for each.
"""

import math

import mlx.core as mx

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
