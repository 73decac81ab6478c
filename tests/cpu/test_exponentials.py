"""On a Linux CPU many exponentials are computed together, as exactly as those of MLX."""

import math

import mlx.core as mx
import numpy as np
import pytest

from backend.cpu.exponentials import exp, log_sum_exp, pays

pytestmark = pytest.mark.mlx

MANY = 2**14


def spread(first, last):
    return mx.array(np.linspace(first, last, MANY, dtype=np.float32))


def as_float64(array):
    return np.array(array).astype(np.float64)


def test_the_power_of_zero_is_one():
    assert set(exp(mx.zeros(MANY)).tolist()) == {1.0}


@pytest.mark.parametrize(("first", "last"), [(-1, 1), (-20, 0), (0, 20), (-69, 69)])
def test_a_power_errs_by_little_more_than_the_rounding_of_its_exponent(first, last):
    numbers = spread(first, last)
    exact = np.exp(as_float64(numbers))
    largest = max(abs(first), abs(last))
    error = np.abs(as_float64(exp(numbers)) / exact - 1)
    assert error.max() < 3e-7 + largest * 1e-7


@pytest.mark.parametrize("largest", [-300.0, 0.0, 300.0])
def test_the_logarithm_of_a_sum_is_that_of_mlx(largest):
    numbers = spread(largest - 40, largest).reshape(2, -1)
    numbers[:, ::3] = -math.inf
    expected = mx.logsumexp(numbers, axis=-1, keepdims=True)
    assert mx.allclose(log_sum_exp(numbers), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("number", [-70.0, -200.0, -1e30, -math.inf])
def test_a_power_of_a_very_negative_number_is_as_good_as_zero(number):
    power = exp(mx.full(MANY, number))
    assert 0 <= mx.max(power).item() < 1e-30


def test_what_is_no_number_stays_none():
    numbers = mx.zeros(MANY)
    numbers[7] = math.nan
    powers = exp(numbers)
    assert math.isnan(powers[7].item())
    assert int(mx.isnan(powers).sum()) == 1


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_powers_of_16_bits_stay_those_of_mlx(dtype):
    numbers = spread(-5, 5).astype(dtype)
    assert mx.array_equal(exp(numbers), mx.exp(numbers))


def test_few_powers_are_those_of_mlx():
    numbers = spread(-5, 5)[:100]
    assert not pays(100, mx.float32)
    assert mx.array_equal(exp(numbers), mx.exp(numbers))
