"""Norms, rotations and gates by kernels in C: MLX's functions, each token alone."""

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models import activations

from backend.cpu.exponentials import prepare_gates
from backend.cpu.kernels import address, kernels
from backend.cpu.products import prepare_products
from backend.cpu.tokenwise import GELU, SILU, open_gates, prepare_tokenwise

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(kernels() is None, reason="there is no C compiler"),
]

WIDTH = 64


@pytest.fixture(autouse=True)
def _prepared():
    prepare_tokenwise()


def drawn(*shape, scale=3.0):
    return mx.random.normal(shape) * scale


def close(found, expected):
    return np.allclose(np.asarray(found), np.asarray(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(WIDTH,), (1, 1, WIDTH), (2, 5, 3, WIDTH), (40, 4096)])
@pytest.mark.parametrize("is_weighted", [True, False])
def test_norms_are_those_of_mlx(functions_of_mlx, shape, is_weighted):
    inputs = drawn(*shape) + 1
    weight, bias = (drawn(shape[-1]), drawn(shape[-1])) if is_weighted else (None, None)
    for name, given in {"rms_norm": (weight,), "layer_norm": (weight, bias)}.items():
        found = getattr(mx.fast, name)(inputs, *given, 1e-5)
        assert found.shape == inputs.shape
        assert close(found, functions_of_mlx[name](inputs, *given, 1e-5))


def test_a_norm_is_that_of_other_layouts_too(functions_of_mlx):
    inputs, weight = drawn(4, WIDTH, 6).swapaxes(1, 2), drawn(2 * WIDTH)[::2]
    found = mx.fast.rms_norm(inputs, weight, 1e-6)
    assert close(found, functions_of_mlx["rms_norm"](inputs, weight, 1e-6))


@pytest.mark.parametrize(
    ("inputs", "weight"),
    [
        (mx.ones((2, WIDTH), mx.bfloat16), mx.ones(WIDTH, mx.bfloat16)),
        (mx.ones((2, WIDTH)), mx.ones(WIDTH, mx.bfloat16)),
        (mx.ones((2, 12)), mx.ones(12)),
        (mx.ones((0, WIDTH)), mx.ones(WIDTH)),
    ],
)
def test_norms_of_other_types_and_widths_stay_with_mlx(functions_of_mlx, inputs, weight):
    found = mx.fast.rms_norm(inputs, weight, 1e-5)
    expected = functions_of_mlx["rms_norm"](inputs, weight, 1e-5)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert mx.array_equal(found, expected)


def test_a_stream_and_a_wrong_shape_are_matters_of_mlx(functions_of_mlx):
    inputs = drawn(2, WIDTH)
    expected = functions_of_mlx["rms_norm"](inputs, None, 1e-5)
    assert mx.array_equal(mx.fast.rms_norm(inputs, None, 1e-5, stream=mx.cpu), expected)
    with pytest.raises(ValueError, match="rms_norm"):
        mx.fast.rms_norm(inputs, mx.ones(WIDTH + 8), 1e-5)


def test_functions_can_be_traced_and_have_gradients():
    norm = nn.RMSNorm(WIDTH)
    inputs = drawn(3, WIDTH)
    assert close(mx.compile(norm)(inputs), norm(inputs))
    gradient = mx.grad(lambda given: mx.fast.rms_norm(given, None, 1e-5).sum())(inputs)
    assert gradient.shape == inputs.shape


ROTATIONS = [
    {"offset": 7},
    {"offset": mx.array([3, 30_000])},
    {"offset": mx.array(11), "traditional": True},
    {"offset": mx.array([5, 6]), "traditional": True, "scale": 0.25},
    {"offset": 9, "base": None, "freqs": mx.arange(1, 17) * 1.5},
]


@pytest.mark.parametrize("form", ROTATIONS)
@pytest.mark.parametrize("shape", [(2, 4, 1, WIDTH), (2, 1, 9, 32), (2, 3, WIDTH)])
def test_rotations_are_those_of_mlx_to_the_last_bit(functions_of_mlx, form, shape):
    form = {"traditional": False, "base": 10_000.0, "scale": 1.0, **form}
    inputs = drawn(*shape)
    expected = functions_of_mlx["rope"](inputs, 32, **form)
    for _ in range(2):
        assert mx.array_equal(mx.fast.rope(inputs, 32, **form), expected)


@pytest.mark.parametrize(
    ("dims", "offset"), [(2 * WIDTH, 0), (7, 0), (0, 0), (-8, 0), (WIDTH, mx.array([1, 2, 3]))]
)
def test_rotations_that_cannot_be_are_matters_of_mlx(functions_of_mlx, dims, offset):
    form = {"traditional": False, "base": 10_000.0, "scale": 1.0, "offset": offset}
    outcomes = []
    for rope in (functions_of_mlx["rope"], mx.fast.rope):
        try:
            outcomes.append(np.asarray(rope(mx.ones((2, 1, 1, WIDTH)), dims, **form)).tolist())
        except (ValueError, RuntimeError) as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


def test_a_rotation_follows_positions_that_are_counted_in_place(functions_of_mlx):
    rope, inputs = nn.RoPE(WIDTH), drawn(2, 1, 1, WIDTH)
    offset = mx.array([4, 8])
    first = rope(inputs, offset=offset)
    offset += 1
    assert not mx.array_equal(rope(inputs, offset=offset), first)
    form = {"traditional": False, "base": 10_000.0, "scale": 1.0, "offset": mx.array([5, 9])}
    expected = functions_of_mlx["rope"](inputs, WIDTH, **form)
    assert mx.array_equal(rope(inputs, offset=offset), expected)


@pytest.mark.parametrize(("kind", "activation"), [(SILU, nn.silu), (GELU, nn.gelu_approx)])
def test_gates_are_those_of_mlx(kind, activation):
    gates = mx.concatenate([mx.linspace(-200, 200, 256), mx.linspace(-3, 3, 256), mx.zeros(8)])
    inputs = drawn(*gates.shape)
    assert close(open_gates(kind, gates, inputs), activation(gates) * inputs)
    assert close(open_gates(kind, gates), activation(gates))
    assert np.isnan(np.asarray(open_gates(kind, mx.full((8,), mx.nan)))).all()


def test_gates_of_other_forms_stay_with_mlx():
    assert open_gates(SILU, drawn(2, 5)) is None
    assert open_gates(SILU, drawn(2, 8), drawn(8)) is None
    assert open_gates(SILU, drawn(2, 8).astype(mx.float16)) is None


def test_a_token_has_the_same_result_in_any_company_and_on_any_number_of_threads():
    inputs, weight = drawn(7, WIDTH), drawn(WIDTH)
    together = {
        "norm": mx.fast.rms_norm(inputs, weight, 1e-5),
        "gate": open_gates(GELU, inputs, inputs),
    }
    for row in range(7):
        one = inputs[row : row + 1]
        assert mx.array_equal(mx.fast.rms_norm(one, weight, 1e-5)[0], together["norm"][row])
        assert mx.array_equal(open_gates(GELU, one, one)[0], together["gate"][row])
    numbers = np.asarray(inputs)
    for parts in (2, 3, 7):
        found = np.empty_like(numbers)
        given = (address(numbers), address(np.asarray(weight)), None, address(found))
        kernels().normalise(*given, 7, WIDTH, 0, 1e-5, parts)
        assert np.array_equal(found, np.asarray(together["norm"]))
        kernels().open_gates(address(numbers), address(numbers), address(found), 448, GELU, parts)
        assert np.array_equal(found, np.asarray(together["gate"]))


@pytest.mark.usefixtures("openblas", "any_size")
@pytest.mark.parametrize(("kind", "has_own"), [("4 bits", 1), ("bfloat16", 1), ("float32", 0)])
def test_only_networks_that_the_kernel_multiplies_have_them(functions_of_mlx, kind, has_own):
    while functions_of_mlx:
        setattr(mx.fast, *functions_of_mlx.popitem())
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH))
    if kind == "4 bits":
        nn.quantize(network, WIDTH, 4)
    else:
        network.set_dtype(getattr(mx, kind))
    prepare_products(network, keeps_type=False)
    prepare_gates()
    assert set(functions_of_mlx) == ({"rms_norm", "layer_norm", "rope"} if has_own else set())
    gates = drawn(1024)
    is_own = mx.array_equal(activations.swiglu(gates, gates), open_gates(SILU, gates, gates))
    assert is_own == has_own
