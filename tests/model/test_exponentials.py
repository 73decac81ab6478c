"""On a Linux CPU many exponentials are computed together, as exactly as those of MLX."""

import math
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models import activations, gemma4_text, llama, switch_layers

from backend.model import exponentials
from backend.model.checkpoint.upstream import reroute
from backend.model.exponentials import exp, log_sum_exp, pays, prepare_gates

pytestmark = pytest.mark.mlx

MANY = 2**14


@pytest.fixture(autouse=True)
def slow_exponentials(monkeypatch):
    """As on a Linux CPU, wherever the tests run."""
    monkeypatch.setattr(exponentials, "_are_slow", lambda: True)


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


def expected_swiglu(gate, inputs):
    gate, inputs = as_float64(gate), as_float64(inputs)
    return gate / (1 + np.exp(-gate)) * inputs


def expected_geglu(gate, inputs):
    gate, inputs = as_float64(gate), as_float64(inputs)
    tanh = np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))
    return 0.5 * gate * (1 + tanh) * inputs


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        (activations, "swiglu", expected_swiglu),
        (llama, "swiglu", expected_swiglu),
        (switch_layers, "swiglu", expected_swiglu),
        (gemma4_text, "geglu", expected_geglu),
    ],
)
@pytest.mark.parametrize("largest", [1, 30, 600])
def test_the_gate_of_a_family_is_the_same_function(module, name, expected, largest):
    prepare_gates()
    gate, inputs = spread(-largest, largest), spread(-2, 2)
    error = np.abs(as_float64(getattr(module, name)(gate, inputs)) - expected(gate, inputs))
    assert (error < 1e-6 + 1e-6 * np.abs(as_float64(gate))).all()


def test_the_gate_of_a_family_is_computed_here_if_it_is_wide(monkeypatch):
    prepare_gates()
    wide = mx.ones((8, MANY // 8))
    calls = []
    monkeypatch.setattr(exponentials, "_exp2", lambda x: calls.append(x.shape) or mx.exp2(x))
    monkeypatch.setattr(mx, "exp2", lambda x: mx.power(2.0, x), raising=False)
    llama.swiglu(wide, wide)
    llama.swiglu(wide[:1], wide[:1])
    assert calls == [wide.shape]


def test_gates_that_were_prepared_are_not_prepared_again():
    prepare_gates()
    prepared = llama.swiglu
    prepare_gates()
    assert llama.swiglu is prepared


def test_a_familys_own_function_of_the_same_name_stays(monkeypatch):
    def own(gate, x):
        return gate + x

    monkeypatch.setattr(llama, "swiglu", own)
    prepare_gates()
    assert llama.swiglu is own


def test_without_slow_exponentials_nothing_is_replaced(monkeypatch):
    monkeypatch.setattr(exponentials, "_are_slow", lambda: False)
    monkeypatch.setattr(llama, "swiglu", activations.swiglu)
    before = llama.swiglu
    prepare_gates()
    assert llama.swiglu is before
    gate = spread(-5, 5)
    assert mx.array_equal(exp(gate), mx.exp(gate))


def test_a_module_that_is_not_imported_is_left_out(monkeypatch):
    modules = {"mlx_lm.models.llama": SimpleNamespace(swiglu=nn.silu)}
    monkeypatch.setattr("sys.modules", modules)
    reroute("swiglu", ["mlx_lm.models.activations"], lambda upstream: upstream)
    assert modules["mlx_lm.models.llama"].swiglu is nn.silu
