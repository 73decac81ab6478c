"""A few tokens meet quantised weights in a kernel."""

import os
import signal
import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from backend.cpu import stored_products
from backend.cpu.kernels import kernels
from backend.cpu.products import prepare_products
from backend.cpu.stored_products import MOST_TOKENS, multiply

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(kernels() is None, reason="there is no C compiler"),
    pytest.mark.usefixtures("openblas"),
]

KNOWN = [(4, 64), (4, 128), (8, 32), (8, 64), (8, 128)]
WIDTH, OUTPUTS = 512, 90


def layer(bits=4, group_size=64, *, mode="affine", dtype=mx.float32, outputs=OUTPUTS):
    mx.random.seed(bits + group_size)
    made = nn.Linear(WIDTH, outputs).to_quantized(group_size=group_size, bits=bits, mode=mode)
    made.set_dtype(dtype)
    return made


def inputs(*shape):
    return mx.random.normal((*shape, WIDTH))


def close(found, expected):
    return np.allclose(np.asarray(found), np.asarray(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("bits", "group_size"), KNOWN)
def test_products_are_those_of_mlx_for_any_few_tokens(bits, group_size):
    made = layer(bits, group_size)
    for tokens in range(1, MOST_TOKENS + 1):
        given = inputs(tokens)
        expected = mx.quantized_matmul(
            given, made.weight, made.scales, made.biases, True, group_size, bits
        )
        assert close(multiply(made, given), expected)


def test_a_token_has_the_same_product_alone_and_in_company():
    made, given = layer(), inputs(3, 5)
    together = multiply(made, given)
    assert together.shape == (3, 5, OUTPUTS)
    for row in range(3):
        for token in range(5):
            alone = multiply(made, given[row, token][None])
            assert mx.array_equal(alone[0], together[row, token])


def test_inputs_and_weights_that_are_exchanged_are_not_those_of_the_product_before():
    made, given = layer(), inputs(2)
    first = np.asarray(multiply(made, given))
    given += 1.0
    assert close(multiply(made, given), first + np.asarray(multiply(made, mx.ones((2, WIDTH)))))
    made.scales, made.biases = 2.0 * made.scales, 2.0 * made.biases
    assert close(multiply(made, given - 1.0), 2.0 * first)


def test_weights_that_are_a_part_of_others_are_read_where_they_are():
    whole, made = layer(), layer()
    half = slice(WIDTH // 2, None)
    made.weight, made.scales, made.biases = (
        array[:, array.shape[1] // 2 :] for array in (whole.weight, whole.scales, whole.biases)
    )
    padded = mx.zeros((3, WIDTH))
    given = padded[:, half] = inputs(3)[:, half]
    assert close(multiply(made, given), multiply(whole, padded))


def test_large_matrices_are_shared_among_threads_without_a_difference():
    made = layer(outputs=2**15)
    given = inputs(2)
    parts = [multiply(part, given) for part in (made, layer(outputs=2**15))]
    expected = mx.quantized_matmul(given, made.weight, made.scales, made.biases, True, 64, 4)
    assert mx.array_equal(*parts)
    assert close(parts[0], expected)


@pytest.fixture
def use_threads(monkeypatch):
    """Return a function that sets the number of threads of a product."""
    return lambda count: monkeypatch.setattr(stored_products, "product_threads", lambda: count)


def with_threads(count, use_threads, made, given):
    use_threads(count)
    return np.asarray(multiply(made, given))


@pytest.mark.parametrize("outputs", [1, 2, 90, 257])
def test_any_number_of_threads_has_the_same_products(use_threads, outputs):
    made, given = layer(outputs=outputs), inputs(MOST_TOKENS)
    alone = with_threads(1, use_threads, made, given)
    for count in (2, 3, 8, 65, 2):
        assert np.array_equal(with_threads(count, use_threads, made, given), alone)


def test_products_at_the_same_time_do_not_wait_for_each_other_nor_mix(use_threads):
    made = [layer(bits) for bits in (4, 8)] * 2
    given = [inputs(MOST_TOKENS) for _ in made]
    mx.eval(given)
    alone = [with_threads(1, use_threads, *pair) for pair in zip(made, given, strict=True)]
    use_threads(2)
    products = [[] for _ in made]

    def compute(place):
        for _ in range(200):
            products[place].append(np.asarray(multiply(made[place], given[place])))

    callers = [threading.Thread(target=compute, args=(place,)) for place in range(len(made))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for found, expected in zip(products, alone, strict=True):
        assert all(np.array_equal(each, expected) for each in found)


def test_a_forked_process_has_threads_of_its_own(use_threads):
    made, given = layer(), inputs(MOST_TOKENS)
    mx.eval(given)
    expected = with_threads(2, use_threads, made, given)
    child = os.fork()
    if not child:
        # A product that waits for threads of the parent would never end.
        signal.alarm(60)
        os._exit(not np.array_equal(with_threads(2, use_threads, made, given), expected))
    assert os.waitpid(child, 0)[1] == 0
    assert np.array_equal(with_threads(2, use_threads, made, given), expected)


@pytest.mark.parametrize(
    "made",
    [
        layer(2),
        layer(6),
        layer(4, 32),
        layer(4, 32, mode="mxfp4"),
        layer(dtype=mx.bfloat16),
    ],
)
def test_other_forms_are_left_to_mlx(made):
    assert multiply(made, inputs(1)) is None


def stating(*, bits=4, group_size=64, scaled=WIDTH):
    """Return a layer of 4 bits in groups of 64 that states these."""
    made = layer()
    made.bits, made.group_size = bits, group_size
    made.scales = made.scales[:, : scaled // 64]
    return made


@pytest.mark.parametrize(
    "made", [stating(bits=8), stating(group_size=128), stating(scaled=WIDTH // 2)]
)
def test_a_matrix_of_another_shape_than_it_states_is_left_to_mlx(made):
    assert multiply(made, inputs(1)) is None


@pytest.mark.parametrize("width", [WIDTH - 1, WIDTH + 64, 2 * WIDTH])
def test_inputs_of_another_width_are_left_to_mlx(width):
    assert multiply(layer(), mx.ones((1, width))) is None


def test_other_types_are_left_to_mlx():
    assert multiply(layer(), inputs(1).astype(mx.bfloat16)) is None


def test_a_function_that_mlx_compiles_is_computed_by_mlx():
    made = layer()

    def product(given):
        found = multiply(made, given)
        return made(given) if found is None else found

    given = inputs(2)
    assert close(mx.compile(product)(given), product(given) + made.bias)


class Network(nn.Module):
    """A quantised embedding, which is the last layer too, and a layer."""

    def __init__(self, bits=4):
        super().__init__()
        mx.random.seed(5)
        self.embedding = nn.Embedding(OUTPUTS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        nn.quantize(self, group_size=64, bits=bits)
        self.set_dtype(mx.bfloat16)

    def __call__(self, tokens):
        return self.embedding.as_linear(self.layer(self.embedding(tokens)))


@pytest.mark.parametrize("tokens", [1, 5, MOST_TOKENS, MOST_TOKENS + 1, 64])
def test_a_network_stays_quantised_and_has_the_logits_of_mlx(tokens):
    given = mx.arange(tokens)[None] % OUTPUTS
    kept, plain = Network(), Network()
    plain.set_dtype(mx.float32)
    prepare_products(kept, keeps_type=False, dequantises=False, least_bytes=0)
    assert kept.layer.weight.dtype == kept.embedding.weight.dtype == mx.uint32
    assert multiply(kept.layer, inputs(1)) is not None
    assert close(kept(given), plain(given))


def test_a_network_in_training_has_gradients_for_a_few_tokens():
    trained, expected = Network(), Network()
    expected.set_dtype(mx.float32)
    prepare_products(
        trained, keeps_type=False, dequantises=False, has_gradients=True, least_bytes=0
    )
    states = inputs(2)

    def loss(states, network):
        return network.layer(states).square().sum()

    assert close(mx.grad(loss)(states, trained), mx.grad(loss)(states, expected))
