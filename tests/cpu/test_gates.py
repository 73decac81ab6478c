"""On a Linux CPU the activations of wide gates are computed with cheaper exponentials."""

import ast
import importlib
import inspect
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models import activations, gemma2, gemma3_text, gemma4_text, llama, switch_layers

from backend.cpu import exponentials
from backend.cpu import exponentials as gates
from backend.cpu.exponentials import prepare_gates
from backend.model.checkpoint.upstream import reroute

pytestmark = pytest.mark.mlx

MANY = 2**14


def spread(first, last, count=MANY):
    return mx.array(np.linspace(first, last, count, dtype=np.float32))


def as_float64(array):
    return np.array(array).astype(np.float64)


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


@pytest.mark.parametrize("family", [gemma2, gemma3_text])
def test_a_family_that_calls_mlx_gets_its_activation_from_here(family, monkeypatch):
    monkeypatch.setattr(family, "nn", nn)
    prepare_gates()
    prepared = family.nn
    prepare_gates()
    assert family.nn is prepared
    assert family.nn.Linear is nn.Linear
    gate = spread(-9, 9)
    expected = expected_geglu(gate, mx.ones_like(gate))
    assert np.abs(as_float64(family.nn.gelu_approx(gate)) - expected).max() < 1e-5
    calls = []
    monkeypatch.setattr(gates, "sigmoid", lambda x: calls.append(x.shape) or mx.sigmoid(x))
    family.MLP(8, MANY)(mx.ones((1, 1, 8)))
    family.MLP(8, 16)(mx.ones((1, 1, 8)))
    assert calls == [(1, 1, MANY)]


@pytest.mark.parametrize("name", gates.WITH_GELU)
def test_no_compiled_function_of_such_a_family_has_the_activation(name):
    tree = ast.parse(inspect.getsource(importlib.import_module(name)))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    calling = [node for node in functions if "nn.gelu_approx(" in ast.unparse(node)]
    assert calling
    assert not any("compile" in ast.unparse(each) for f in calling for each in f.decorator_list)


@pytest.mark.parametrize("shape", [(1, 30, 100), (2, 15, 100), (7, 1000)])
def test_more_than_a_cache_holds_is_computed_in_pieces(shape, monkeypatch):
    monkeypatch.setattr(exponentials, "LEAST_NUMBERS", 1)
    monkeypatch.setattr(gates, "LEAST_NUMBERS", 1)
    monkeypatch.setattr(gates, "MOST_NUMBERS", 2000)
    monkeypatch.setattr(gates, "PIECE_NUMBERS", 700)
    sizes = []
    sigmoid = gates.sigmoid
    monkeypatch.setattr(gates, "sigmoid", lambda x: sizes.append(x.size) or sigmoid(x))
    prepare_gates()
    # Products below 4, which float32 holds to 2e-7.
    gate, inputs = mx.random.uniform(-2, 2, shape), mx.random.uniform(-2, 2, shape)
    found = llama.swiglu(gate, inputs)
    assert found.shape == shape
    assert np.abs(as_float64(found) - expected_swiglu(gate, inputs)).max() < 1e-6
    assert sum(sizes) == gate.size
    assert max(sizes) == max(700, shape[-1])
    sizes.clear()
    row = mx.random.uniform(-2, 2, shape[-1:])
    error = as_float64(llama.swiglu(gate, row)) - expected_swiglu(gate, row)
    assert np.abs(error).max() < 1e-6
    assert sizes == [gate.size]


def test_a_module_that_is_not_imported_is_left_out(monkeypatch):
    modules = {"mlx_lm.models.llama": SimpleNamespace(swiglu=nn.silu)}
    monkeypatch.setattr("sys.modules", modules)
    reroute("swiglu", ["mlx_lm.models.activations"], lambda upstream: upstream)
    assert modules["mlx_lm.models.llama"].swiglu is nn.silu
